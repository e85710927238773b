# fork, pipes, exec, signals, the end of children.
use strict;
use warnings;
use IPC::Open2;
use IPC::Open3;
$| = 1;
pipe(my $reader, my $writer) or die $!;
my $pid = fork // die $!;
if (!$pid) { close $reader; print $writer "from the child\n"; close $writer; exit 3 }
close $writer;
print <$reader>;
waitpid $pid, 0;
print $? >> 8, "\n";
print `echo backquotes; exit 2`, $? >> 8, "\n";
open(my $sort, '|-', 'sort -r') or die $!;
print $sort "$_\n" for qw(a c b);
close $sort;
my $cat = open2(my $from, my $to, 'tr a-z A-Z');
print $to "shout\n";
close $to;
print <$from>;
waitpid $cat, 0;
my $sleep = fork // die $!;
if (!$sleep) { exec 'sleep', 30 }
kill TERM => $sleep;
waitpid $sleep, 0;
print $? & 127, "\n";
local $SIG{CHLD} = sub { print "child ended\n" };
my $quick = fork // die $!;
exit 0 if !$quick;
sleep 5;
local $SIG{CHLD} = 'DEFAULT';
print system('sh', '-c', 'exit 4') >> 8, "\n";
