<?php
// Shows what must differ between copies of one image, and what must not. Run by
// PHP's built-in web server, for every request anew.
$read = fn (string $path): string => trim(file_get_contents($path));
$before = hrtime(true);
usleep(10000);
echo json_encode([
    'unique' => [
        'bytes' => bin2hex(random_bytes(16)),
        'number' => random_int(0, PHP_INT_MAX),
        // Seeded when it is first used, which is in every request.
        'mt_rand' => mt_rand() . mt_rand() . mt_rand(),
        'boot_id' => $read('/proc/sys/kernel/random/boot_id'),
    ],
    'hostname' => gethostname(),
    'pid' => getmypid(),
    'time' => microtime(true),
    'ticked' => intdiv(hrtime(true) - $before, 1000000),
    'greeting' => getenv('GREETING'),
    'limit' => $read('/sys/fs/cgroup/memory.max'),
]);
