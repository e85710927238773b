<?php
// Says all that a program can see of how PHP was started.
//
// Built from a runtime template, it must say the same as when it was started.

const CHILD = 'echo json_encode([$argv, $_SERVER["argc"], getenv(), getcwd(), PHP_BINARY]);';

function words(string $path): array
{
    return explode("\0", file_get_contents($path));
}

// Opcache's file has a name that is drawn.
function without_numbers(array $texts): array
{
    return array_values(preg_replace(['/(?<=ZendSem\.)\w+/', '/\d+/'], ['X', 'N'], $texts));
}

function failure(callable $try): array
{
    try {
        return [$try()];
    } catch (Throwable $e) {
        return [get_class($e), $e->getMessage(), $e->getFile(), $e->getLine(), $e->getTraceAsString()];
    }
}

function child(): mixed
{
    $pipes = [];
    $child = proc_open([PHP_BINARY, '-n', '-r', CHILD, '--', 'x'], [1 => ['pipe', 'w']], $pipes);
    $said = stream_get_contents($pipes[1]);
    return [json_decode($said), proc_close($child)];
}

// The title lies where the arguments and the environment were.
function titles(): array
{
    $seen = [cli_get_process_title(), cli_set_process_title('a title'), cli_get_process_title()];
    $seen[] = getenv('WHO');
    $seen[] = child();
    return [...$seen, cli_set_process_title(''), cli_get_process_title()];
}

// Without what differs from one request to the next.
function server(): array
{
    $own = ['REQUEST_TIME', 'REQUEST_TIME_FLOAT', 'REMOTE_PORT', 'HTTP_TRACEPARENT'];
    return array_diff_key($_SERVER, array_flip($own));
}

function mapped(): array
{
    preg_match_all('~(?<=\s)[/\[].*$~m', file_get_contents('/proc/self/maps'), $found);
    $names = array_unique($found[0]);
    sort($names);
    return without_numbers($names);
}

function descriptors(): array
{
    $all = array_values(array_diff(scandir('/proc/self/fd'), ['.', '..']));
    return [$all, without_numbers(array_map(fn ($fd) => @readlink("/proc/self/fd/$fd"), $all))];
}

function seen(array $arguments, array $frames): array
{
    return [
        'arguments' => $arguments,
        'frames' => $frames,
        'server' => server(),
        'environment' => [getenv(), $_ENV, getenv('WHO'), getenv('PATH'), getenv('NONE')],
        'options' => getopt('ab:', ['flag', 'file:'], $rest),
        'rest' => $rest,
        'files' => get_included_files(),
        'here' => [__FILE__, __DIR__, __LINE__, getcwd(), realpath('.'), realpath('mirror.php')],
        'interpreter' => [PHP_BINARY, PHP_SAPI, php_sapi_name(), PHP_VERSION, PHP_OS, PHP_EXTRA_VERSION],
        'settings' => ini_get_all(null, false),
        'setting_files' => [php_ini_loaded_file(), php_ini_scanned_files(), get_cfg_var('cfg_file_path')],
        'given_settings' => [get_cfg_var('mirror.given'), ini_get('precision')],
        'modules' => [get_loaded_extensions(), get_loaded_extensions(true)],
        'functions' => get_defined_functions()['user'],
        'constants' => array_map(count(...), get_defined_constants(true)),
        'classes' => get_declared_classes(),
        'globals' => array_keys($GLOBALS),
        'superglobals' => [$_GET, $_POST, $_COOKIE, $_FILES, $_REQUEST],
        'resources' => array_map(get_resource_type(...), get_resources()),
        'streams' => [stream_get_wrappers(), stream_get_filters(), stream_get_transports()],
        'buffers' => ob_get_status(true),
        'collector' => [gc_enabled(), gc_status()['runs']],
        'error' => [error_get_last(), error_reporting(), ini_get('display_errors')],
        'failure' => failure(fn () => intdiv(1, 0)),
        'locale' => [setlocale(LC_ALL, 0), localeconv(), date_default_timezone_get(), date('T', 0)],
        'now' => abs(time() - $_SERVER['REQUEST_TIME']) < 5,
        'child' => child(),
        'titles' => titles(),
        'descriptors' => descriptors(),
        'mapped' => mapped(),
        'cmdline' => words('/proc/self/cmdline'),
        'environ' => words('/proc/self/environ'),
        'comm' => words('/proc/self/comm'),
        'executable' => [readlink('/proc/self/exe'), readlink('/proc/self/cwd'), readlink('/proc/self/root')],
        'signals' => preg_grep('/^(Sig|Shd|Threads)/', file('/proc/self/status')),
        'host' => [gethostname(), php_uname('n')],
        'hosts' => words('/etc/hosts'),
        'ids' => [getmypid(), getmyuid(), umask(), preg_grep('/^(PPid|Uid|Gid|Groups)/', file('/proc/self/status'))],
        'temporary' => sys_get_temp_dir(),
        'root' => scandir('/'),
        'links' => array_map(fn ($path) => stat($path)['nlink'], ['/', '/app', '/usr', '/etc']),
        'thaws' => words('/dev/thaw'),
        // The path at which a template is frozen is that of no file.
        'start' => [file_exists('/dev/thaw-start'), @file_get_contents('///dev/thaw-start'), scandir('/dev')],
    ];
}

function drawn(): array
{
    $order = range(1, 50);
    shuffle($order);
    return [
        'mt_rand' => mt_rand(),
        'rand' => rand(),
        'lcg_value' => lcg_value(),
        'uniqid' => uniqid('', true),
        'random_bytes' => bin2hex(random_bytes(16)),
        'random_int' => random_int(0, PHP_INT_MAX),
        'openssl' => bin2hex(openssl_random_pseudo_bytes(16)),
        'shuffle' => $order,
        'password' => password_hash('x', PASSWORD_BCRYPT, ['cost' => 4]),
    ];
}
