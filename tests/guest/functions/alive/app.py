"""A server that is never idle, unless it is to be `quiet`: what it is doing must go on in every copy of it.

  GET /            what it has, as JSON
  GET /write?TEXT  keeps TEXT in memory, in a file, and on its way through a pipe
  GET /reserve     reserves much more memory than there is, and keeps a byte in it
  GET /worker      the same as /, after a question to another process, if there is one
"""

import http.server
import json
import mmap
import os
import socket
import sys
import threading
import time
import uuid

state = {"requests": 0, "spins": 0, "ticks": 0, "echoes": 0, "text": ""}
pipe = os.pipe()
mine, its = socket.socketpair()
heap = [bytearray(os.urandom(4096)) for _ in range(2000)]
reserved = []
heap_sum = sum(sum(page) for page in heap)


RESERVED = 100 << 30


def reserve():
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    area = mmap.mmap(-1, RESERVED, flags=flags)
    area[RESERVED // 2] = len(reserved) + 1
    reserved.append(area)


def spin():
    while True:
        state["spins"] += 1


def tick():
    while True:
        time.sleep(0.01)
        state["ticks"] += 1


def echo(listener):
    """Talks to itself over loopback."""
    there, _ = listener.accept()
    here = threading.Thread(target=lambda: [there.send(there.recv(8)) for _ in iter(int, 1)], daemon=True)
    here.start()


def talk():
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=echo, args=(listener,), daemon=True).start()
    with socket.create_connection(listener.getsockname()) as talker:
        while True:
            talker.send(b"question")
            assert talker.recv(8) == b"question"
            state["echoes"] += 1
            time.sleep(0.002)


def begin():
    for work in (spin, tick, talk):
        threading.Thread(target=work, daemon=True).start()


def work():
    """Another process, which answers how often it was asked."""
    asked = 0
    while its.recv(1):
        asked += 1
        its.send(asked.to_bytes(4, "big"))


def ask():
    mine.send(b"?")
    return int.from_bytes(mine.recv(4), "big")


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, _, text = self.path.partition("?")
        state["requests"] += 1
        if state["requests"] == 1 and "quiet" not in sys.argv:
            begin()
        if path == "/write":
            state["text"] = text
            with open("/tmp/text", "w") as file:
                file.write(text)
            os.write(pipe[1], text.encode())
        said = dict(state)
        if path == "/reserve":
            reserve()
        if path == "/worker":
            said["asked"] = ask()
        if path == "/read":
            with open("/tmp/text") as file:
                said["file"] = file.read()
            said["pipe"] = os.read(pipe[0], 100).decode()
        with open("/proc/sys/kernel/random/boot_id") as file:
            said["boot_id"] = file.read()
        said["random"] = uuid.uuid4().hex
        said["monotonic"] = time.monotonic()
        said["reserved"] = [area[RESERVED // 2] for area in reserved]
        said["heap"] = sum(sum(page) for page in heap) == heap_sum
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if "worker" in sys.argv and os.fork() == 0:
    work()
    sys.exit()
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Server).serve_forever()
