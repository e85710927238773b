"""What `Template` of E2B's Python SDK does, against a node of Thaw: E2B_API_URL and E2B_SANDBOX_URL
say where.

The SDK is as PyPI has it. Each function below is one check, whose name is printed when it has passed.
"""

import asyncio
import os
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

from e2b import (
    AsyncSandbox,
    AsyncTemplate,
    BuildException,
    Sandbox,
    Template,
    default_build_logger,
    wait_for_file,
    wait_for_port,
)

CONTEXT = tempfile.mkdtemp()


def put(path, text, mode=0o644):
    file = Path(CONTEXT, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


def raises(kind, does):
    try:
        does()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def at_port(box, port, path="/"):
    """What a program of a sandbox answers."""
    request = urllib.request.Request(os.environ["E2B_SANDBOX_URL"] + path)
    request.add_header("E2b-Sandbox-Id", box.sandbox_id)
    request.add_header("E2b-Sandbox-Port", str(port))
    request.add_header("E2b-Traffic-Access-Token", box.traffic_access_token)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def a_template_is_built_and_its_sandboxes_have_the_start_command_running():
    put("app.txt", "first")
    template = (
        Template(file_context_path=CONTEXT)
        .from_template("base")
        .set_workdir("/app")
        .copy("app.txt", "/app/")
        .set_envs({"GREETING": "hello"})
        .run_cmd('echo "$GREETING from $(pwd)" > said.txt')
        .run_cmd(["echo one", "echo two >&2"])
        .set_start_cmd("python3 -m http.server 8000", wait_for_port(8000))
    )
    lines = []
    info = Template.build(template, "served", on_build_logs=lambda line: lines.append(line.message))
    assert info.name == "served" and info.tags == ["default"], info
    text = "\n".join(lines)
    for line in ("RUN echo one", "one\n", "two\n", "COPY app.txt /app/", "python3 -m http.server"):
        assert line in text, (line, text)
    box = Sandbox.create("served")
    assert at_port(box, 8000, "/app.txt") == "first"
    assert at_port(box, 8000, "/said.txt") == "hello from /app\n"
    # Commands and files begin where the steps have left off.
    assert box.commands.run("pwd; echo $GREETING").stdout == "/app\nhello\n"
    assert box.files.read("app.txt") == "first"
    assert [one.cmd for one in box.commands.list()] == ["/bin/bash"], box.commands.list()
    again = Sandbox.create(info.template_id)
    assert at_port(again, 8000, "/app.txt") == "first"
    # Each has files of its own.
    box.files.write("app.txt", "changed")
    assert at_port(again, 8000, "/app.txt") == "first"
    # A snapshot of one keeps what commands begin with.
    snapshot = again.create_snapshot()
    copy = Sandbox.create(snapshot.snapshot_id)
    assert copy.commands.run("pwd; echo $GREETING").stdout == "/app\nhello\n"
    for one in (box, again, copy):
        one.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)


def a_name_that_is_built_again_means_the_new_build():
    old = Sandbox.create("served")
    put("app.txt", "second")
    template = (
        Template(file_context_path=CONTEXT)
        .from_template("served")
        .copy("app.txt", ".")
    )
    Template.build(template, "served")
    new = Sandbox.create("served")
    assert at_port(new, 8000, "/app.txt") == "second"
    assert at_port(old, 8000, "/app.txt") == "first", "those that are there live on"
    old.kill()
    new.kill()


def files_have_owners_and_modes():
    put("tree/a.sh", "echo a", 0o755)
    put("tree/below/b.txt", "b")
    os.symlink("a.sh", Path(CONTEXT, "tree/link"))
    put("one.txt", "1")
    put("two.txt", "2")
    template = (
        Template(file_context_path=CONTEXT)
        .from_template("base")
        .copy("one.txt", "/first.txt")
        .run_cmd("mkdir -p /there/below && echo old > /there/a.sh && echo kept > /there/below/kept")
        .set_user("worker")
        .set_workdir("/home/worker/deep/down")
        .copy("tree", "/there")
        .copy("tree", "new")
        .copy("*.txt", "texts/")
        .copy("one.txt", "renamed", mode=0o600, user="root")
        .copy_items([{"src": ["one.txt", "two.txt"], "dest": "/home/worker/"}])
        .copy("tree/a.sh", "big", gzip=False)
        .run_cmd("id -un > who; touch /there/mine || echo refused > refused")
        .run_cmd("id -un > /root-was-here", user="root")
        .make_dir("made", mode=0o700)
        .rename("who", "whom")
        .make_symlink("whom", "link")
    )
    Template.build(template, "files", skip_cache=True)
    box = Sandbox.create("files")
    read = box.files.read
    assert read("/there/a.sh") == "echo a" and read("/there/below/kept") == "kept\n"
    assert read("new/below/b.txt") == "b" and read("texts/one.txt") == "1"
    assert read("/home/worker/two.txt") == "2" and read("link") == "worker\n"
    assert read("/root-was-here") == "root\n"
    info = box.files.get_info
    assert info("new/link").symlink_target is not None
    assert (info("new/a.sh").owner, info("new/a.sh").mode & 0o777) == ("worker", 0o755)
    assert info("new/below").owner == "worker" and info("/there/below/b.txt").owner == "worker"
    assert box.commands.run("id -un; pwd").stdout == "worker\n/home/worker/deep/down\n"
    assert (info("made").owner, info("made").mode & 0o777) == ("worker", 0o700)
    hidden = box.files.get_info("renamed", user="root")
    assert (hidden.owner, hidden.mode & 0o777) == ("root", 0o600), hidden
    assert box.commands.run("ls -A / | grep -c thaw-copy || true").stdout == "0\n"
    # Before the first `set_user`, files are of whoever commands run as.
    assert info("/first.txt").owner == "root", info("/first.txt")
    box.kill()


def a_dockerfile_becomes_steps():
    put("here.txt", "here")
    dockerfile = (
        "FROM e2bdev/base\n"
        "ARG WHO=world\n"
        "ENV WHERE=/srv/app NAME=$WHO\n"
        "WORKDIR $WHERE\n"
        "COPY --chmod=644 here.txt .\n"
        'RUN echo "hello $NAME" > hello\n'
        "CMD sleep 1000\n"
    )
    template = Template(file_context_path=CONTEXT).from_dockerfile(dockerfile)
    template.set_ready_cmd("true")
    Template.build(template, "dockerfile")
    box = Sandbox.create("dockerfile")
    assert box.files.read("/srv/app/hello") == "hello world\n"
    assert box.files.read("/srv/app/here.txt") == "here"
    assert box.commands.run("id -un").stdout == "user\n"
    box.kill()


def failures_say_which_command_has_failed():
    base = lambda: Template(file_context_path=CONTEXT).from_template("base")
    failing = base().run_cmd("true").run_cmd("echo some output; echo why >&2; exit 3")
    error = raises(BuildException, lambda: Template.build(failing, "failing"))
    for word in ("exit code 3", "some output", "why", "echo some output"):
        assert word in str(error), error
    info = Template.build_in_background(failing, "failing")
    deadline = time.time() + 60
    while (status := Template.get_build_status(info)).status.value in ("building", "waiting"):
        assert time.time() < deadline
        time.sleep(0.1)
    assert status.status.value == "error" and status.reason.step == "2", status
    assert "why" in [line.message for line in status.reason.log_entries], status
    start = base().set_start_cmd("echo no such port; exit 7", wait_for_port(8000))
    error = raises(BuildException, lambda: Template.build(start, "failing"))
    assert "exit code 7" in str(error) and "no such port" in str(error), error
    error = raises(BuildException, lambda: Template.build(Template().from_image("redis"), "failing"))
    assert "[images]" in str(error) and '"redis"' in str(error), error
    error = raises(BuildException, lambda: Template.build(base(), "failing", cpu_count=4096))
    assert "processors" in str(error), error
    # Nothing of it can be used.
    assert "404" in str(raises(Exception, lambda: Sandbox.create("failing")))


def names_have_tags():
    template = Template().from_template("base").run_cmd("echo 1 > /version")
    info = Template.build(template, "tagged:v1", tags=["stable"])
    assert sorted(info.tags) == ["stable", "v1"], info
    assert Template.exists("tagged") and not Template.exists("not-there") and Template.exists("base")
    second = Template().from_template("tagged:v1").run_cmd("echo 2 > /version")
    Template.build(second, "tagged:v2")
    for name, version in (("tagged:v1", "1\n"), ("tagged:stable", "1\n"), ("tagged:v2", "2\n")):
        box = Sandbox.create(name)
        assert box.files.read("/version") == version, name
        box.kill()
    assigned = Template.assign_tags("tagged:v2", ["stable", "default"])
    assert sorted(assigned.tags) == ["default", "stable"], assigned
    box = Sandbox.create("tagged")
    assert box.files.read("/version") == "2\n"
    box.kill()
    tags = {tag.tag: tag.build_id for tag in Template.get_tags("tagged")}
    assert tags["stable"] == tags["v2"] != tags["v1"], tags
    Template.remove_tags("tagged", ["v2", "stable"])
    assert sorted(tag.tag for tag in Template.get_tags("tagged")) == ["default", "v1"]


def builds_in_the_background_say_how_far_they_are():
    template = (
        Template()
        .from_template("base")
        .run_cmd("for n in 1 2 3; do echo line $n; sleep 0.3; done")
        .set_start_cmd("sleep 0.5; touch /tmp/is-ready; sleep 1000", wait_for_file("/tmp/is-ready"))
    )
    info = Template.build_in_background(template, "background")
    offset, seen, states = 0, [], []
    while True:
        status = Template.get_build_status(info, logs_offset=offset)
        offset += len(status.log_entries)
        seen += [line.message for line in status.log_entries]
        states.append((status.status.value, len(seen)))
        if status.status.value in ("ready", "error"):
            break
        time.sleep(0.1)
    assert states[-1][0] == "ready", (states, status)
    assert [line for line in seen if line.startswith("line")] == ["line 1", "line 2", "line 3"], seen
    assert len({count for _, count in states}) > 2, "lines come while it is built"
    box = Sandbox.create("background")
    assert box.files.exists("/tmp/is-ready")
    box.kill()


def the_asynchronous_sdk_builds_too():
    async def build():
        put("async.txt", "async")
        template = (
            AsyncTemplate(file_context_path=CONTEXT)
            .from_base_image()
            .copy("async.txt", "/tmp/async.txt", force_upload=True)
        )
        await AsyncTemplate.build(template, "asynchronous", on_build_logs=default_build_logger())
        box = await AsyncSandbox.create("asynchronous")
        assert await box.files.read("/tmp/async.txt") == "async"
        await box.kill()
        assert await AsyncTemplate.exists("asynchronous")

    asyncio.run(build())


def request(method, path, body=None):
    made = urllib.request.Request(
        os.environ["E2B_API_URL"] + path, method=method, data=body,
        headers={"X-API-KEY": os.environ["E2B_API_KEY"]},
    )
    with urllib.request.urlopen(made, timeout=60) as answer:
        return answer.read()


def templates_are_deleted():
    import json

    listed = {one["names"][0]: one for one in json.loads(request("GET", "/templates"))}
    assert listed["served"]["buildStatus"] == "ready" and listed["served"]["memoryMB"] > 0, listed
    assert listed["served"]["spawnCount"] >= 1
    box = Sandbox.create("served")
    for one in listed.values():
        request("DELETE", "/templates/" + one["templateID"])
    assert json.loads(request("GET", "/templates")) == []
    assert not Template.exists("served")
    assert "404" in str(raises(Exception, lambda: Sandbox.create("served")))
    assert at_port(box, 8000, "/app.txt") == "second", "a sandbox outlives its template"
    box.kill()


CHECKS = [
    a_template_is_built_and_its_sandboxes_have_the_start_command_running,
    a_name_that_is_built_again_means_the_new_build,
    files_have_owners_and_modes,
    a_dockerfile_becomes_steps,
    failures_say_which_command_has_failed,
    names_have_tags,
    builds_in_the_background_say_how_far_they_are,
    the_asynchronous_sdk_builds_too,
    templates_are_deleted,
]


def main():
    wanted = sys.argv[1:]
    for check in CHECKS:
        if wanted and check.__name__ not in wanted:
            continue
        began = time.time()
        try:
            check()
        except BaseException:
            traceback.print_exc()
            print(f"{check.__name__} has failed", file=sys.stderr)
            sys.exit(1)
        print(check.__name__, flush=True)
        print(f"  {time.time() - began:.1f} s", file=sys.stderr, flush=True)


main()
# Threads of the SDK's HTTP client now and then abort an interpreter that ends in order.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
