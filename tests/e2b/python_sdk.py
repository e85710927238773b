"""What E2B's Python SDK does, against a node of Thaw: E2B_API_URL and E2B_SANDBOX_URL say where.

The SDK is as PyPI has it. Each function below is one check, whose name is printed when it has passed.
"""

import asyncio
import datetime
import io
import os
import socket
import sys
import time
import traceback
import urllib.error
import urllib.request

from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)


def raises(kind, does):
    try:
        does()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def lives_are_controlled():
    box = Sandbox.create(timeout=600, metadata={"who": "a b&c"}, envs={"GREETING": "hello"})
    info = box.get_info()
    assert info.sandbox_id == box.sandbox_id and info.state == SandboxState.RUNNING, info
    assert info.metadata == {"who": "a b&c"} and info.memory_mb > 0, info
    seconds = (info.end_at - info.started_at).total_seconds()
    assert 590 < seconds < 610, seconds
    assert box.is_running()
    assert box.commands.run("echo $GREETING $E2B_SANDBOX").stdout == "hello true\n"

    box.set_timeout(60)
    assert (box.get_info().end_at - info.started_at).total_seconds() < 300
    again = Sandbox.connect(box.sandbox_id, timeout=900)
    assert again.commands.run("echo again").stdout == "again\n"
    assert (box.get_info().end_at - info.started_at).total_seconds() > 800

    assert Sandbox.kill(box.sandbox_id)
    assert not Sandbox.kill(box.sandbox_id)
    raises(SandboxNotFoundException, box.get_info)
    raises(SandboxNotFoundException, lambda: Sandbox.connect(box.sandbox_id))
    assert not box.is_running()
    raises(TimeoutException, lambda: box.commands.run("true"))
    error = raises(SandboxException, lambda: Sandbox.create("no-such-template"))
    assert error.status_code == 404 and "no-such-template" in str(error), error


def time_ends_a_sandbox():
    box = Sandbox.create(timeout=1)
    pausing = Sandbox.create(timeout=1, lifecycle={"on_timeout": "pause", "auto_resume": True})
    pausing.files.write("/tmp/kept", "kept")
    deadline = time.time() + 60
    while box.is_running() or pausing.get_info().state != SandboxState.PAUSED:
        assert time.time() < deadline, "their time has not come"
        time.sleep(0.1)
    # A request for it resumes it.
    assert pausing.files.read("/tmp/kept") == "kept"
    pausing.kill()


def sandboxes_are_listed():
    boxes = [Sandbox.create(metadata={"n": str(n), "set": "list"}) for n in range(3)]

    def names(limit=None, **query):
        query["metadata"] = {"set": "list", **query.get("metadata", {})}
        pages = Sandbox.list(query=SandboxQuery(**query), limit=limit)
        found = []
        while pages.has_next:
            found.append([info.metadata["n"] for info in pages.next_items()])
        return found

    assert names() == [["2", "1", "0"]], names()
    assert names(limit=2) == [["2", "1"], ["0"]]
    assert names(metadata={"n": "1"}) == [["1"]]
    assert names(template="base") == [["2", "1", "0"]]
    assert names(template="other") == [[]]
    tomorrow = datetime.datetime.now() + datetime.timedelta(days=1)
    assert names(started_after=tomorrow) == [[]]
    boxes[0].pause()
    assert names(state=[SandboxState.PAUSED]) == [["0"]]
    assert names(state=[SandboxState.RUNNING]) == [["2", "1"]]
    for box in boxes:
        assert box.kill()
    assert names() == [[]]


def pausing_keeps_memory_and_files():
    box = Sandbox.create()
    counter = box.commands.run("n=0; while read _; do n=$((n+1)); echo $n; done",
                               background=True, stdin=True, timeout=0)
    box.commands.send_stdin(counter.pid, "\n")
    box.files.write("/tmp/state", "before")
    assert box.pause()
    assert not box.pause()
    assert box.get_info().state == SandboxState.PAUSED
    raises(TimeoutException, lambda: box.files.read("/tmp/state"))
    box = Sandbox.connect(box.sandbox_id)
    assert box.get_info().state == SandboxState.RUNNING
    assert box.files.read("/tmp/state") == "before"
    box.commands.send_stdin(counter.pid, "\n")
    box.commands.close_stdin(counter.pid)
    assert counter.wait().stdout == "1\n2\n"
    box.kill()


def copies_are_forked():
    box = Sandbox.create(metadata={"set": "fork"})
    box.files.write("/tmp/state", "common")
    one, two = box.fork(count=2)
    one.files.write("/tmp/state", "one")
    assert two.files.read("/tmp/state") == "common" == box.files.read("/tmp/state")
    assert one.files.read("/tmp/state") == "one"
    for each in (box, one, two):
        assert each.kill()


def commands_run():
    with Sandbox.create() as box:
        done = box.commands.run("echo out; echo err >&2")
        assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 0), done
        failed = raises(CommandExitException, lambda: box.commands.run("echo so; exit 3"))
        assert (failed.exit_code, failed.stdout) == (3, "so\n")
        assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
        assert box.commands.run("echo $A$B", envs={"A": "1", "B": "ü"}).stdout == "1ü\n"
        assert box.commands.run("id -un", user="root").stdout == "root\n"
        raises(SandboxException, lambda: box.commands.run("true", user="nobody-knows"))
        raises(SandboxException, lambda: box.commands.run("true", cwd="/none"))
        # A relative one begins where relative paths of files do.
        box.files.make_dir("relative/one")
        found = box.commands.run("pwd", cwd="relative/one").stdout
        assert found == box.files.get_info("relative/one").path + "\n", found

        seen = []
        box.commands.run("for i in 1 2 3; do echo $i; sleep 0.05; done; echo end >&2",
                         on_stdout=seen.append, on_stderr=seen.append)
        assert "".join(seen) == "1\n2\n3\nend\n" and len(seen) > 1, seen
        large = box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
        assert large.stdout == "x" * 3_000_000

        raises(TimeoutException, lambda: box.commands.run("sleep 1000", timeout=1))
        deadline = time.time() + 30
        while box.commands.list():
            assert time.time() < deadline, "the command outlives its time"
            time.sleep(0.1)


def commands_run_in_the_background():
    with Sandbox.create() as box:
        sleeper = box.commands.run("sleep 1000", background=True)
        found = [each for each in box.commands.list() if each.pid == sleeper.pid]
        assert found[0].cmd == "/bin/bash" and found[0].args == ["-l", "-c", "sleep 1000"], found
        assert sleeper.kill()
        killed = raises(CommandExitException, sleeper.wait)
        assert killed.exit_code == -1 and killed.error == "signal: killed", killed
        assert not box.commands.kill(sleeper.pid)
        # It is gone once the answer is there.
        quick = box.commands.run("sleep 1000", background=True)
        assert quick.kill()
        raises(CommandExitException, lambda: box.commands.run(f"kill -0 {quick.pid}"))

        cat = box.commands.run("cat", background=True, stdin=True)
        cat.send_stdin("one ")
        box.commands.stream_input(cat.pid, ["two ", b"three"])
        cat.close_stdin()
        assert cat.wait().stdout == "one two three"
        raises(NotFoundException, lambda: box.commands.send_stdin(cat.pid, "late"))

        # Without standard input a program sees its end at once.
        assert box.commands.run("cat; echo end").stdout == "end\n"

        late = box.commands.run("read line; echo got $line", background=True, stdin=True)
        late.disconnect()
        joined = box.commands.connect(late.pid)
        box.commands.send_stdin(late.pid, "this\n")
        assert joined.wait().stdout == "got this\n"

        sleeper = box.commands.run("sleep 1000", background=True)
        box.kill()
        raises(TimeoutException, sleeper.wait)


def terminals_work():
    with Sandbox.create() as box:
        shell = box.pty.create(PtySize(rows=30, cols=100), envs={"PS1": ""}, timeout=60)
        box.pty.send_stdin(shell.pid, b"stty size; exit 4\n")
        printed = []
        ended = raises(CommandExitException,
                       lambda: shell.wait(on_pty=lambda data: printed.append(data)))
        assert ended.exit_code == 4, ended
        assert b"30 100" in b"".join(printed), printed

        shell = box.pty.create(PtySize(rows=10, cols=10), timeout=60)
        box.pty.resize(shell.pid, PtySize(rows=40, cols=120))
        box.pty.send_stdin(shell.pid, b"stty size; exit\n")
        printed = []
        shell.wait(on_pty=printed.append)
        assert b"40 120" in b"".join(printed), printed
        shell = box.pty.create(PtySize(rows=10, cols=10))
        assert box.pty.kill(shell.pid)


def files_are_read_and_written():
    with Sandbox.create() as box:
        files = box.files
        written = files.write("/tmp/deep/er/file.txt", "text ü")
        assert (written.name, written.path) == ("file.txt", "/tmp/deep/er/file.txt"), written
        assert files.read("/tmp/deep/er/file.txt") == "text ü"
        data = bytes(range(256)) * 4096
        files.write("/tmp/data", data)
        assert bytes(files.read("/tmp/data", format="bytes")) == data
        assert b"".join(files.read("/tmp/data", format="stream")) == data
        files.write("/tmp/stream", io.BytesIO(data))
        files.write("/tmp/packed", data, gzip=True)
        assert box.commands.run("cat /tmp/stream /tmp/packed | wc -c").stdout.strip() == str(2 * len(data))
        both = files.write_files([{"path": "/tmp/1", "data": "1"}, {"path": "/tmp/2", "data": b"2"}])
        assert [each.path for each in both] == ["/tmp/1", "/tmp/2"]
        assert files.read("/tmp/1") + files.read("/tmp/2") == "12"

        info = files.get_info("/tmp/data")
        assert (info.type, info.size, info.owner) == (FileType.FILE, len(data), "root"), info
        assert info.permissions.startswith("-rw"), info
        age = datetime.datetime.now(datetime.timezone.utc) - info.modified_time
        assert abs(age.total_seconds()) < 600, info
        raises(FileNotFoundException, lambda: files.read("/tmp/none"))
        raises(FileNotFoundException, lambda: files.get_info("/tmp/none"))
        raises(SandboxException, lambda: files.write("/tmp", "a directory"))

        url = box.download_url("/tmp/1", use_signature_expiration=60)
        request = urllib.request.Request(url, headers={"E2b-Sandbox-Id": box.sandbox_id})
        assert urllib.request.urlopen(request).read() == b"1"


def directories_are_changed():
    with Sandbox.create() as box:
        files = box.files
        assert files.make_dir("/tmp/a/b") and not files.make_dir("/tmp/a/b")
        files.write("/tmp/a/file", "x")
        box.commands.run("ln -s file /tmp/a/link")
        entries = files.list("/tmp/a")
        shown = {each.name: each.type for each in entries}
        assert shown == {"b": FileType.DIR, "file": FileType.FILE, "link": FileType.SYMLINK}, entries
        link = files.get_info("/tmp/a/link")
        assert link.symlink_target == "/tmp/a/file", link
        files.write("/tmp/a/b/inner", "")
        assert "/tmp/a/b/inner" in [each.path for each in files.list("/tmp/a", depth=2)]
        moved = files.rename("/tmp/a/file", "/tmp/a/moved")
        assert moved.path == "/tmp/a/moved"
        assert files.exists("/tmp/a/moved") and not files.exists("/tmp/a/file")
        files.remove("/tmp/a")
        assert not files.exists("/tmp/a")
        files.remove("/tmp/a")
        raises(FileNotFoundException, lambda: files.list("/tmp/a"))
        raises(InvalidArgumentException, lambda: files.list("/etc/passwd"))


def directories_are_watched():
    with Sandbox.create() as box:
        plain = box.files.watch_dir("/tmp")
        deep = box.files.watch_dir("/tmp", recursive=True)
        box.files.write("/tmp/a/b", "x")
        box.commands.run("echo y >> /tmp/a/b; mv /tmp/a/b /tmp/c; rm /tmp/c")
        seen = []
        deadline = time.time() + 30
        while ("c", "remove") not in seen:
            assert time.time() < deadline, seen
            seen += [(event.name, event.type.value) for event in deep.get_new_events()]
        for event in (("a", "create"), ("a/b", "create"), ("a/b", "write"), ("a/b", "rename"),
                      ("c", "create")):
            assert event in seen, (event, seen)
        # Each watcher hears on its own.
        names = set()
        while names != {"a", "c"}:
            assert time.time() < deadline and names <= {"a", "c"}, names
            names |= {event.name for event in plain.get_new_events()}
        deep.stop()
        plain.stop()
        raises(SandboxException, lambda: box.files.watch_dir("/tmp/none"))


def port(box, number, path="/", token=None):
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(number)}
    if token:
        headers["E2B-Traffic-Access-Token"] = token
    request = urllib.request.Request(os.environ["E2B_SANDBOX_URL"] + path, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=30).read().decode()
    except urllib.error.HTTPError as error:
        return error.code


SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("Upgrade") == "echo":
            self.send_response(101); self.send_header("Connection", "upgrade")
            self.send_header("Upgrade", "echo"); self.end_headers()
            while (line := self.rfile.readline()): self.wfile.write(line.upper())
            return
        body = self.path.encode()
        self.send_response(200); self.send_header("Content-Length", len(body)); self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Handler).serve_forever()
"""


def ports_are_reached():
    box = Sandbox.create()
    box.files.write("/tmp/server.py", SERVER)
    box.commands.run("exec python3 /tmp/server.py", background=True, timeout=0)
    token = box.traffic_access_token
    deadline = time.time() + 30
    while port(box, 3000, token=token) == 502:
        assert time.time() < deadline, "nothing listens"
        time.sleep(0.1)
    assert port(box, 3000, "/a?b=c", token) == "/a?b=c"
    assert port(box, 3000) == 403 and port(box, 3000, token="x") == 403
    assert port(box, 3001, token=token) == 502

    # A protocol of its own goes through, as a WebSocket does.
    host, number = os.environ["E2B_SANDBOX_URL"].split("//")[1].split(":")
    with socket.create_connection((host, int(number)), timeout=30) as client:
        client.sendall((f"GET / HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box.sandbox_id}\r\n"
                        f"E2b-Sandbox-Port: 3000\r\nE2B-Traffic-Access-Token: {token}\r\n"
                        "Connection: Upgrade\r\nUpgrade: echo\r\n\r\n").encode())
        reader = client.makefile("rb")
        assert b" 101 " in reader.readline()
        while reader.readline() != b"\r\n":
            pass
        client.sendall(b"hello\n")
        assert reader.readline() == b"HELLO\n"
    box.kill()

    with Sandbox.create(network={"allow_public_traffic": True}) as public:
        assert public.traffic_access_token is None
        public.files.write("/tmp/server.py", SERVER)
        public.commands.run("exec python3 /tmp/server.py", background=True, timeout=0)
        while port(public, 3000) == 502:
            assert time.time() < deadline + 30, "nothing listens"
            time.sleep(0.1)
        assert port(public, 3000, "/open") == "/open"


def use_is_measured():
    with Sandbox.create() as box:
        [sample] = box.get_metrics()
        assert sample.cpu_count >= 1 and 0 < sample.mem_used <= sample.mem_total, sample
        busy = box.commands.run("while :; do :; done", background=True, timeout=0)
        assert box.get_metrics()[-1].cpu_used_pct > 1

        deadline = time.time() + 60
        while len(box.get_metrics()) < 4:
            assert time.time() < deadline, "no samples are kept"
            time.sleep(1)
        samples = box.get_metrics()
        times = [each.timestamp for each in samples]
        assert times == sorted(times) and all(each.mem_used > 0 for each in samples), samples
        assert samples[-2].cpu_used_pct > 1, samples
        # A span has whole seconds, and that of the last sample may be the present one.
        since, until = times[0], times[1]
        assert [each.timestamp for each in box.get_metrics(start=since, end=until)] == times[:2]
        assert box.get_metrics(end=times[0] - datetime.timedelta(seconds=2)) == []
        # One that is paused has its past, and is not woken for it.
        busy.kill()
        box.pause()
        past = box.get_metrics()
        assert [each.timestamp for each in past[:3]] == times[:3], past
        time.sleep(6)
        assert len(box.get_metrics()) == len(past), past
        assert box.get_info().state == SandboxState.PAUSED


def snapshots_are_taken():
    box = Sandbox.create()
    box.files.write("/tmp/state", "before")
    taken = box.create_snapshot(name="first")
    assert taken.names == ["first"], taken
    box.files.write("/tmp/state", "after")
    for name in (taken.snapshot_id, "first"):
        with Sandbox.create(name) as copy:
            assert copy.files.read("/tmp/state") == "before"
    assert box.files.read("/tmp/state") == "after"
    found = Sandbox.list_snapshots().next_items()
    assert [each.snapshot_id for each in found] == [taken.snapshot_id], found
    assert Sandbox.delete_snapshot(taken.snapshot_id)
    assert not Sandbox.delete_snapshot(taken.snapshot_id)
    box.kill()


def what_is_missing_says_so():
    raises(AuthenticationException, lambda: Sandbox.create(api_key="e2b_wrong"))
    for network in ({"mask_request_host": "other.example"}, {"https_ports": [8443]}):
        error = raises(SandboxException, lambda: Sandbox.create(network=network))
        assert "501" in str(error), error
    with Sandbox.create() as box:
        error = raises(SandboxException, lambda: box.create_snapshot(mode="filesystem"))
        assert "501" in str(error), error
        stranger = Sandbox.create()
        # The token of one sandbox opens no other.
        stolen = urllib.request.Request(
            os.environ["E2B_SANDBOX_URL"] + "/files?path=/etc/passwd",
            headers={"E2b-Sandbox-Id": box.sandbox_id,
                     "X-Access-Token": stranger._envd_access_token})
        assert raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(stolen)).code == 401
        stranger.kill()


def the_asynchronous_sdk_works():
    async def check():
        box = await AsyncSandbox.create()
        done = await asyncio.gather(*(box.commands.run(f"echo {n}") for n in range(5)))
        assert [each.stdout for each in done] == [f"{n}\n" for n in range(5)]
        await box.files.write("/tmp/x", "y")
        assert await box.files.read("/tmp/x") == "y"
        await box.kill()

    asyncio.run(check())


failed = []
for check in (lives_are_controlled, time_ends_a_sandbox, sandboxes_are_listed,
              pausing_keeps_memory_and_files, copies_are_forked, commands_run,
              commands_run_in_the_background, terminals_work, files_are_read_and_written,
              directories_are_changed, directories_are_watched, ports_are_reached,
              use_is_measured, snapshots_are_taken, what_is_missing_says_so, the_asynchronous_sdk_works):
    try:
        check()
        print(check.__name__, flush=True)
    except Exception:
        failed.append(check.__name__)
        traceback.print_exc()
if failed:
    print(f"failed: {', '.join(failed)}", file=sys.stderr)
# Threads of the SDK's HTTP client now and then abort an interpreter that ends in order.
sys.stdout.flush()
sys.stderr.flush()
os._exit(bool(failed))
