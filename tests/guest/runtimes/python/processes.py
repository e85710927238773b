"""Child processes: fork, subprocess, their ends and their pipes."""

import os
import signal
import subprocess
import sys

# fork and wait
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.close(reader)
    os.write(writer, b"from the child")
    os._exit(7)
os.close(writer)
print(os.read(reader, 100), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

# subprocess
run = subprocess.run
print(run(["echo", "hello"], capture_output=True, text=True, check=True).stdout)
print(run("exit 3", shell=True).returncode)
print(run(["tr", "a-z", "A-Z"], input="shout", capture_output=True, text=True).stdout)
print(run("echo one; echo two >&2", shell=True, stderr=subprocess.STDOUT, stdout=subprocess.PIPE).stdout)
print(run(["sh", "-c", "kill -TERM $$"]).returncode == -signal.SIGTERM)
print(run(["sh", "-c", "echo $MARK; pwd"], env={"MARK": "x"}, cwd="/tmp", capture_output=True, text=True).stdout)
try:
    run(["sleep", "20"], timeout=0.1)
except subprocess.TimeoutExpired as error:
    print("timeout", round(error.timeout, 1))
try:
    run(["/no/such/program"])
except FileNotFoundError as error:
    print(error.strerror, error.filename)

# A pipeline, and more data than a pipe holds.
first = subprocess.Popen(["seq", "1", "100000"], stdout=subprocess.PIPE)
second = subprocess.Popen(["tail", "-n", "1"], stdin=first.stdout, stdout=subprocess.PIPE)
first.stdout.close()
print(second.communicate()[0], first.wait(), second.returncode)
big = bytes(range(256)) * 4096
print(run(["cat"], input=big, capture_output=True).stdout == big)

# Interaction, groups, sessions, signals.
cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
cat.stdin.write(b"line\n")
cat.stdin.flush()
print(cat.stdout.readline(), os.getpgid(cat.pid) == cat.pid, os.getsid(cat.pid) == cat.pid)
os.killpg(cat.pid, signal.SIGINT)
print(cat.wait() == -signal.SIGINT)
stopped = subprocess.Popen(["sleep", "20"])
stopped.send_signal(signal.SIGSTOP)
print(os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1]))
stopped.send_signal(signal.SIGCONT)
print(os.WIFCONTINUED(os.waitpid(stopped.pid, os.WCONTINUED)[1]))
stopped.kill()
print(stopped.wait() == -signal.SIGKILL)
caught = []
signal.signal(signal.SIGCHLD, lambda number, frame: caught.append(number))
run(["true"])
print("SIGCHLD", caught != [])

# spawn, and this program again
pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 5"], {})
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(run([sys.executable, "-c", "import sys; print(sys.argv)", "a b"], capture_output=True, text=True).stdout)
try:
    os.waitpid(-1, 0)
except ChildProcessError as error:
    print(error.strerror)
