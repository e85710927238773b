"""A server that changes much of its memory all the time, and finds out if a copy of it was made
of pages that never were there at the same time.

  GET /  how often it has written, and what it has found wrong
"""

import http.server
import json
import struct
import sys
import threading
import time

PAGE = 4096
PAGES = int(sys.argv[1]) * (1 << 20) // PAGE
state = {"rounds": 0, "torn": 0, "first": 0, "second": 0, "unequal": 0}
lock = threading.Lock()
buffer = bytearray(PAGES * PAGE)
still = bytes(range(256)) * (8 << 12)
still_sum = sum(still[::4001])


def write():
    """Writes each page after the other, and finds in each what it wrote in the last round."""
    while True:
        this = state["rounds"] + 1
        for at in range(0, len(buffer), PAGE):
            if struct.unpack_from("Q", buffer, at)[0] != this - 1:
                state["torn"] += 1
            struct.pack_into("Q", buffer, at, this)
        state["rounds"] = this


def count():
    """Two counters that are never seen with different values."""
    while True:
        with lock:
            state["first"] += 1
            for _ in range(100):
                pass
            state["second"] += 1
        # The lock is not fair.
        time.sleep(0.0005)


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    requests = 0

    def do_GET(self):
        Server.requests += 1
        if Server.requests == 1:
            for work in (write, count):
                threading.Thread(target=work, daemon=True).start()
        with lock:
            said = dict(state)
        said["unequal"] += said["first"] != said["second"]
        said["still"] = sum(still[::4001]) == still_sum
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


sys.setswitchinterval(0.0005)
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Server).serve_forever()
