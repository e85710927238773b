"""Remembers how often it was asked: /count answers at once, /hold/SECONDS takes its time,
/later/SECONDS/PORT then says hello to a server of the host, /grow/MEBIBYTES takes memory, /keep/TEXT keeps it,
/open/PORT/N opens connections to a server of the host and says how that went, /close closes
them, /draw/MEBIBYTES keeps random bytes and answers with the digest of all that is kept, /digest
does that."""

import errno
import hashlib
import http.server
import os
import socket
import threading
import time

asked = 0
lock = threading.Lock()
kept = []
# In the image of the function already.
before = bytearray(1 << 20)
opened = []


def hold(seconds):
    time.sleep(float(seconds))


def connect(port):
    with socket.create_connection(("host.thaw.internal", int(port))) as connection:
        connection.sendall(b"hello")


def later(seconds, port):
    hold(seconds)
    connect(port)


def open_some(port, number):
    outcomes = []
    for _ in range(int(number)):
        try:
            opened.append(socket.create_connection(("host.thaw.internal", int(port))))
            outcomes.append("made")
        except OSError as error:
            outcomes.append(errno.errorcode.get(error.errno, str(error)))
    return " ".join(outcomes)


def close_all():
    while opened:
        opened.pop().close()


def grow(mebibytes):
    memory = bytearray(int(mebibytes) << 20)
    memory[::4096] = b"x" * len(memory[::4096])
    kept.append(memory)


def draw(mebibytes):
    kept.append(os.urandom(int(mebibytes) << 20))
    before[:] = os.urandom(len(before))
    return digest()


def keep(text):
    kept.append(text.encode() * 64)


def digest():
    return hashlib.sha256(b"".join([*kept, before])).hexdigest()


DEEDS = {
    "count": lambda: None,
    "hold": hold,
    "later": later,
    "grow": grow,
    "keep": keep,
    "open": open_some,
    "close": close_all,
    "draw": draw,
    "digest": digest,
}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        global asked
        _, deed, *arguments = self.path.split("/")
        with lock:
            asked += 1
            number = asked
        print(f"request {number}", flush=True)
        said = DEEDS[deed or "count"](*arguments)
        body = f"{said or number}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    port = int(os.environ.get("PORT", "8080"))
    http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()
