<?php
// A server that is a script of its own, which says what it sees.
$arguments = [$argv, $argc];
$frames = debug_backtrace();
require 'mirror.php';

$data = stream_get_contents(fopen(__FILE__, 'r'), -1, __COMPILER_HALT_OFFSET__);
$seen = [...seen($arguments, $frames), 'data' => $data, 'input' => stream_get_contents(STDIN)];
$drawn = drawn();
if (in_array('--fail', $argv)) {
    throw new LogicException('for nobody to catch');
}

$answers = [
    '/' => fn () => $seen,
    '/drawn' => fn () => $drawn,
    '/import' => fn () => require 'neighbour.php',
    '/thaws' => fn () => words('/dev/thaw'),
];
$server = stream_socket_server('tcp://0.0.0.0:8080');
while ($client = stream_socket_accept($server, -1)) {
    $path = explode(' ', fgets($client))[1];
    while (trim(fgets($client)) !== '');
    $body = json_encode($answers[$path](), JSON_THROW_ON_ERROR);
    $length = strlen($body);
    fwrite($client, "HTTP/1.1 200 OK\r\nContent-Length: $length\r\nConnection: close\r\n\r\n$body");
    fclose($client);
}
__halt_compiler();what is behind the program: ä
