<?php
// Run by PHP's built-in web server, for every request anew.
$name = $_GET['name'] ?? 'you';
header('Content-Type: text/plain; charset=utf-8');
echo 'Hello from PHP ', PHP_MAJOR_VERSION, "! Nice to meet $name.\n";
