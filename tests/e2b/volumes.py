"""Volumes of E2B's Python SDK against a node of Thaw: E2B_API_URL, E2B_SANDBOX_URL and
E2B_VOLUME_API_URL say where, OTHER_KEY is a key of somebody else.

The SDK is as PyPI has it. Each function below is one check, whose name is printed when it has passed.
"""

import asyncio
import io
import os
import sys
import time
import traceback

from e2b import AsyncSandbox, AsyncVolume, NotFoundException, Sandbox, Volume
from e2b.exceptions import AuthenticationException, SandboxException, VolumeException
from e2b.volume.types import VolumeFileType

OTHER = {"api_key": os.environ["OTHER_KEY"]}


def raises(kind, does):
    try:
        does()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def destroyed(volume):
    assert Volume.destroy(volume.volume_id)
    assert not Volume.destroy(volume.volume_id)


def volumes_are_made_found_and_destroyed():
    volume = Volume.create("first")
    assert [(one.volume_id, one.name) for one in Volume.list()] == [(volume.volume_id, "first")]
    info = Volume.get_info(volume.volume_id)
    assert (info.name, info.token) == ("first", volume.token) and info.token, info
    raises(VolumeException, lambda: Volume.create("first"))
    raises(VolumeException, lambda: Volume.create("no/name"))
    assert Volume.connect(volume.volume_id).name == "first"
    destroyed(volume)
    assert Volume.list() == []
    raises(NotFoundException, lambda: Volume.get_info(volume.volume_id))


def files_are_written_and_read_from_outside():
    volume = Volume.create("files")
    made = volume.make_dir("/a/b", force=True, mode=0o750)
    assert (made.path, made.type, made.mode) == ("/a/b", VolumeFileType.DIRECTORY, 0o750), made
    raises(NotFoundException, lambda: volume.make_dir("/x/y"))
    written = volume.write_file("/a/b/text", "hällo")
    assert (written.name, written.size, written.type) == ("text", 6, VolumeFileType.FILE), written
    assert volume.read_file("/a/b/text") == "hällo"
    volume.write_file("/a/b/text", b"short", mode=0o600)
    assert volume.read_file("/a/b/text", format="bytes") == b"short"
    big = os.urandom(3_000_001)
    volume.write_file("/big", io.BytesIO(big))
    assert b"".join(volume.read_file("/big", format="stream")) == big
    assert [one.path for one in volume.list("/")] == ["/a", "/big"]
    assert [one.path for one in volume.list("/", depth=3)] == ["/a", "/a/b", "/a/b/text", "/big"]
    assert volume.update_metadata("/a/b/text", mode=0o644).mode == 0o644
    assert volume.exists("/big") and not volume.exists("/none")
    assert volume.get_info("/big").size == len(big)
    assert "uid" in str(raises(VolumeException, lambda: volume.update_metadata("/big", uid=5)))
    raises(VolumeException, lambda: volume.write_file("/a/../../x", "x"))
    full = raises(VolumeException, lambda: volume.write_file("/full", bytes(40 << 20)))
    assert "full" in str(full), full
    for path in ["/a", "/big", "/full"]:
        volume.remove(path)
    raises(NotFoundException, lambda: volume.remove("/big"))
    assert volume.list("/") == []
    destroyed(volume)


def sandboxes_share_a_volume_that_outlives_them():
    volume = Volume.create("shared")
    volume.write_file("/from-outside", "outside")
    one = Sandbox.create(volume_mounts={"/mnt/deep/data": volume})
    other = Sandbox.create(volume_mounts={"/data": "shared"})
    assert one.commands.run("cat /mnt/deep/data/from-outside").stdout == "outside"
    one.commands.run("echo inside > /mnt/deep/data/from-inside")
    assert other.files.read("/data/from-inside") == "inside\n"
    assert volume.read_file("/from-inside") == "inside\n"
    mounts = [(mount["name"], mount["path"]) for mount in other.get_info().volume_mounts]
    assert mounts == [("shared", "/data")], mounts
    # It is in use, also while one that has it is paused.
    other.kill()
    one.pause()
    in_use = raises(VolumeException, lambda: Volume.destroy(volume.volume_id))
    assert "in use" in str(in_use), in_use
    one.connect()
    assert one.commands.run("cat /mnt/deep/data/from-inside").stdout == "inside\n"
    snapshot = one.create_snapshot()
    copy = Sandbox.create(snapshot.snapshot_id)
    copy.commands.run("echo copy > /mnt/deep/data/from-copy")
    assert one.files.read("/mnt/deep/data/from-copy") == "copy\n"
    for sandbox in [one, copy]:
        sandbox.kill()
    assert volume.read_file("/from-copy") == "copy\n"
    destroyed(volume)
    refused = raises(SandboxException, lambda: Sandbox.create(snapshot.snapshot_id))
    assert "was destroyed" in str(refused), refused
    Sandbox.delete_snapshot(snapshot.snapshot_id)


def no_link_of_a_sandbox_leads_to_the_node():
    volume = Volume.create("hostile")
    box = Sandbox.create(volume_mounts={"/data": volume})
    box.commands.run("ln -s /etc/passwd /data/passwd; ln -s / /data/root; ln -s ../.. /data/up")
    assert volume.get_info("/passwd").target == "/etc/passwd"
    for path in ["/passwd", "/root/etc/passwd", "/up/volume.json", "/../volume.json"]:
        error = raises(VolumeException, lambda: volume.read_file(path))
        assert "root:" not in str(error), error
        raises(VolumeException, lambda: volume.write_file(path, "x"))
    raises(VolumeException, lambda: volume.list("/root"))
    volume.remove("/root")
    assert os.path.exists("/etc/passwd")
    box.kill()
    destroyed(volume)


def others_have_nothing_of_it():
    volume = Volume.create("mine")
    assert Volume.list(**OTHER) == []
    raises(NotFoundException, lambda: Volume.get_info(volume.volume_id, **OTHER))
    assert not Volume.destroy(volume.volume_id, **OTHER)
    refused = raises(
        SandboxException, lambda: Sandbox.create(volume_mounts={"/data": "mine"}, **OTHER)
    )
    assert "was not found" in str(refused), refused
    theirs = Volume.create("mine", **OTHER)
    stranger = Volume(volume.volume_id, "mine", token=theirs.token)
    for does in [lambda: stranger.list("/"), lambda: stranger.write_file("/x", "x")]:
        raises(AuthenticationException, does)
    assert Volume.destroy(theirs.volume_id, **OTHER)
    destroyed(volume)


async def asynchronous():
    volume = await AsyncVolume.create("async")
    await volume.write_file("/file", "async")
    box = await AsyncSandbox.create(volume_mounts={"/data": volume})
    assert (await box.commands.run("cat /data/file")).stdout == "async"
    await box.kill()
    assert await AsyncVolume.destroy(volume.volume_id)


def the_asynchronous_sdk_works():
    asyncio.run(asynchronous())


CHECKS = [
    volumes_are_made_found_and_destroyed,
    files_are_written_and_read_from_outside,
    sandboxes_share_a_volume_that_outlives_them,
    no_link_of_a_sandbox_leads_to_the_node,
    others_have_nothing_of_it,
    the_asynchronous_sdk_works,
]

if __name__ == "__main__":
    failed = 0
    for check in CHECKS:
        began = time.monotonic()
        try:
            check()
        except Exception:
            failed += 1
            print(f"{check.__name__} FAILED", flush=True)
            traceback.print_exc()
            continue
        print(check.__name__, flush=True)
        print(f"{time.monotonic() - began:.2f} s", file=sys.stderr)
    # Threads of the SDK's HTTP client now and then abort an interpreter that ends in order.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failed != 0)
