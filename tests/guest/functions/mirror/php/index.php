<?php
// A site of PHP's built-in web server, which says what it sees.
$arguments = [$argv ?? null, $argc ?? null];
$frames = debug_backtrace();
require __DIR__ . '/mirror.php';

$answers = [
    '/' => fn () => seen($arguments, $frames),
    '/drawn' => fn () => drawn(),
    '/processes' => fn () => count(glob('/proc/[0-9]*')),
    '/import' => fn () => require 'neighbour.php',
    '/thaws' => fn () => words('/dev/thaw'),
];
header('Content-Type: application/json');
echo json_encode($answers[parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH)](), JSON_THROW_ON_ERROR);
