<?php
// Parsing, computing, files, sockets, compression.
mt_srand(1);
$words = [];
for ($i = 0; $i < 20000; $i++) {
    $word = 'w' . ($i * 7919 % 101);
    $words[$word] = ($words[$word] ?? 0) + 1;
}
ksort($words);
echo count($words), ' ', array_sum($words), ' ', md5(json_encode($words)), "\n";
echo preg_replace_callback('/(\d+)/', fn ($m) => $m[1] * 2, 'a1 b22 c333'), "\n";
$directory = sys_get_temp_dir() . '/php' . getmypid();
mkdir($directory);
file_put_contents("$directory/data", str_repeat('thaw ', 50000), LOCK_EX);
echo filesize("$directory/data"), ' ', hash_file('sha256', "$directory/data"), "\n";
echo implode(' ', scandir($directory)), "\n";
$file = new SplFileObject("$directory/data", 'r+');
$file->fseek(10);
echo $file->fread(10), '|', $file->ftruncate(20), "\n";
rename("$directory/data", "$directory/moved");
echo file_get_contents("$directory/moved"), "\n";
unlink("$directory/moved");
rmdir($directory);
$server = stream_socket_server('tcp://127.0.0.1:0', $code, $message);
$client = stream_socket_client('tcp://' . stream_socket_get_name($server, false));
$accepted = stream_socket_accept($server);
fwrite($client, "hello\n");
echo strtoupper(fgets($accepted));
$pair = stream_socket_pair(STREAM_PF_UNIX, STREAM_SOCK_STREAM, 0);
fwrite($pair[0], 'pair');
echo fread($pair[1], 10), "\n";
$read = [$client];
$write = $except = null;
echo stream_select($read, $write, $except, 0, 10000), "\n";
function fibonacci(): Generator
{
    [$a, $b] = [0, 1];
    while (true) {
        yield $a;
        [$a, $b] = [$b, $a + $b];
    }
}
foreach (fibonacci() as $i => $number) {
    if ($i > 60) {
        echo $number, "\n";
        break;
    }
}
try {
    intdiv(1, 0);
} catch (DivisionByZeroError $error) {
    echo $error->getMessage(), "\n";
}
echo (new DateTime('2024-02-29', new DateTimeZone('UTC')))->modify('+1 year')->format(DATE_ATOM), "\n";
$sieve = new SplFixedArray(200000);
$primes = 0;
for ($i = 2; $i < 200000; $i++) {
    if ($sieve[$i]) continue;
    $primes++;
    for ($j = $i * 2; $j < 200000; $j += $i) $sieve[$j] = true;
}
echo $primes, "\n";
