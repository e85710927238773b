<?php
// Child processes and their pipes.
echo shell_exec('echo from the shell');
exec('printf "a\nb\n"; exit 3', $lines, $code);
echo implode(',', $lines), " $code\n";
$pipes = [];
$process = proc_open(['sort', '-r'], [['pipe', 'r'], ['pipe', 'w']], $pipes);
fwrite($pipes[0], "a\nc\nb\n");
fclose($pipes[0]);
echo stream_get_contents($pipes[1]);
echo proc_close($process), "\n";
$child = pcntl_fork();
if ($child === 0) {
    exit(7);
}
pcntl_waitpid($child, $status);
echo pcntl_wexitstatus($status), "\n";
pcntl_signal(SIGUSR1, function () { echo "signal\n"; });
posix_kill(posix_getpid(), SIGUSR1);
pcntl_signal_dispatch();
