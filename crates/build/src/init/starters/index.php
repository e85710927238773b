<?php
// Answers every request with a greeting; PHP's built-in server runs it for each anew.
$name = $_GET['name'] ?? 'you';
header('Content-Type: text/plain; charset=utf-8');
echo "Hello from PHP! Nice to meet $name.\n";
