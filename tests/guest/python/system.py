"""The process itself: signals, time, limits, environment, exit handlers."""
import atexit
import faulthandler
import locale
import os
import platform
import resource
import select
import signal
import sys
import time

atexit.register(print, "atexit handler")

print("-- identity")
print(os.getpid() == int(os.readlink("/proc/self")), os.getuid() == os.geteuid(), os.getcwd() == os.path.realpath("."))
print(sys.platform, platform.machine(), platform.system(), sys.byteorder, sys.maxsize)
print(os.path.realpath(sys.executable) == os.path.realpath("/proc/self/exe"), sys.getfilesystemencoding())
print(os.environ.get("GUEST_VALUE"), sys.argv[1:], sys.stdin.read())
os.environ["NEW"] = "value"
print(os.getenv("NEW"), os.getenv("ABSENT"))
print(resource.getrlimit(resource.RLIMIT_CORE)[0] >= -1, resource.getpagesize())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 1000, len(os.sched_getaffinity(0)) >= 1)
print(locale.setlocale(locale.LC_ALL, "C"), os.getloadavg()[0] >= 0)

print("-- time")
a, b = time.monotonic(), time.monotonic()
print(a <= b, time.time() > 1.6e9, time.perf_counter_ns() > 0, time.process_time() > 0)
start = time.monotonic()
time.sleep(0.03)
print(time.monotonic() - start >= 0.03)
print(time.strftime("%Y-%m-%d", time.gmtime(86400 * 365)), time.clock_getres(time.CLOCK_MONOTONIC))

print("-- signals")
seen = []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(signal.Signals(number).name))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
print(seen)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
print(seen, sorted(s.name for s in signal.sigpending()))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
print(seen)


def on_alarm(number, frame):
    raise TimeoutError("alarm")


signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.03)
try:
    time.sleep(5)
except TimeoutError as error:
    print(error)
signal.setitimer(signal.ITIMER_REAL, 0.03)
try:
    while True:
        pass
except TimeoutError as error:
    print("busy", error)
read_end, write_end = os.pipe()
signal.signal(signal.SIGALRM, lambda number, frame: os.write(write_end, b"woken"))
signal.setitimer(signal.ITIMER_REAL, 0.03)
print(os.read(read_end, 10))
os.set_blocking(write_end, False)
signal.set_wakeup_fd(write_end)
os.kill(os.getpid(), signal.SIGUSR1)
print(select.select([read_end], [], [], 1)[0] == [read_end], os.read(read_end, 10))
signal.set_wakeup_fd(-1)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except KeyboardInterrupt:
    print("KeyboardInterrupt")
print(signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN, signal.strsignal(9))
os.close(read_end)
try:
    os.write(write_end, b"x")
except BrokenPipeError as error:
    print("BrokenPipeError")
faulthandler.enable()

print("-- memory")
blocks = [bytearray(1 << 20) for _ in range(64)]
print(sum(len(block) for block in blocks))
blocks = None
try:
    bytearray(1 << 50)
except MemoryError:
    print("MemoryError")
sys.stderr.write("to stderr\n")
sys.exit(9)
