"""A server of four processes, as many servers are: a first one that takes requests, and three
workers. Each says what it has of its own and of what all share, as JSON.

  GET /            of all of them
  GET /N           of worker N alone
  GET /grow/MIB    each worker has so much more memory of its own
  GET /share       a worker writes to shared memory
  GET /end/N       worker N ends
  GET /fork        the first one has a child, and waits for its end
  GET /play        the workers count from now on, in turn, in memory of their own and in shared memory
  GET /played      how far each has come, in both
  GET /keep/MIB    so much more is in a file
  GET /kept        a checksum of that file
"""

import http.server
import json
import mmap
import os
import socket
import struct
import threading
import zlib

WORKERS = 3
inherited = os.urandom(24 << 20)
shared = mmap.mmap(-1, 1 << 20)
with open("/tmp/file", "wb") as written:
    written.write(bytes(1 << 16))
file = mmap.mmap(os.open("/tmp/file", os.O_RDWR), 1 << 16)
own = bytearray(b"own")
score = mmap.mmap(-1, 4096)
ring = [socket.socketpair() for _ in range(WORKERS)]
played = 0
asked = 0


def said():
    return {
        "pid": os.getpid(),
        "asked": asked,
        "inherited": zlib.crc32(inherited),
        "own": zlib.crc32(own),
        "shared": zlib.crc32(shared),
        "file": zlib.crc32(file),
        "played": played,
        "score": struct.unpack_from("3q", score),
    }


def play(number):
    """Counts whenever the worker before has counted."""
    global played
    before, behind = ring[number][0], ring[(number + 1) % WORKERS][1]
    if number == 0:
        behind.send(b"!")
    while before.recv(1):
        played += 1
        struct.pack_into("q", score, number * 8, played)
        behind.send(b"!")


def serve_worker(number, ends):
    global asked
    while True:
        what, _, amount = ends.recv(64).decode().partition(" ")
        asked += 1
        if what == "grow":
            own.extend(os.urandom(int(amount) << 20))
        elif what == "share":
            for memory in (shared, file):
                memory[asked % len(memory)] = (memory[asked % len(memory)] + 1) % 256
        elif what == "play":
            threading.Thread(target=play, args=(number,), daemon=True).start()
        elif what in ("", "end"):
            os._exit(0)
        ends.send(json.dumps(said()).encode())


def hire(number):
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        serve_worker(number, its)
    its.close()
    return mine


workers = [hire(number) for number in range(WORKERS)]


def ask(worker, what="tell"):
    worker.send(what.encode())
    return json.loads(worker.recv(4096))


def kept_sum():
    with open("/tmp/kept", "rb") as kept:
        return zlib.crc32(kept.read())


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        global asked
        asked += 1
        _, what, *amount = self.path.split("/")
        if what == "":
            answer = [said()] + [ask(worker) for worker in workers]
        elif what == "grow":
            answer = [ask(worker, f"grow {amount[0]}") for worker in workers]
        elif what == "share":
            answer = ask(workers[0], "share")
        elif what in ("play", "played"):
            answer = [ask(worker, what) for worker in workers]
        elif what == "keep":
            with open("/tmp/kept", "wb") as kept:
                kept.write(os.urandom(int(amount[0]) << 20))
            answer = kept_sum()
        elif what == "kept":
            answer = kept_sum()
        elif what == "end":
            workers[int(amount[0])].send(b"end")
            answer = workers[int(amount[0])].recv(1) == b""
        elif what == "fork":
            child = os.fork()
            if child == 0:
                os._exit(7)
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            answer = ask(workers[int(what)])
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Server).serve_forever()
