# Answers every request with a greeting. Perl's own modules are enough for that.
use strict;
use warnings;
use IO::Socket::INET;

# What is done here is done once, when the function is built.
my $greeting = 'Hello from Perl!';

sub answer {
    my ($client) = @_;
    my (undef, $target) = split ' ', (<$client> // '');
    # The head of a request ends with an empty line.
    while (defined(my $line = <$client>)) {
        last if $line =~ /^\r?\n$/;
    }
    my ($name) = ($target // '/') =~ /[?&]name=([\w.-]+)/;
    my $body = "$greeting Nice to meet " . ($name // 'you') . ".\n";
    print $client "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n",
        'Content-Length: ', length $body, "\r\nConnection: close\r\n\r\n", $body;
}

my $server = IO::Socket::INET->new(
    LocalAddr => '0.0.0.0',
    LocalPort => $ENV{PORT} // 8080,
    Listen    => 64,
    ReuseAddr => 1,
) or die "cannot listen: $@\n";
while (1) {
    my $client = $server->accept or next;
    answer($client);
    close $client;
}
