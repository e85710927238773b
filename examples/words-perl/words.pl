#!/usr/bin/perl
# Counts words on standard input, the most frequent first.
use strict;
use warnings;

my %times;
while (my $line = <STDIN>) {
    $times{lc $_}++ for $line =~ /\w+/g;
}
for my $word (sort { $times{$b} <=> $times{$a} || $a cmp $b } keys %times) {
    print "$times{$word} $word\n";
}
