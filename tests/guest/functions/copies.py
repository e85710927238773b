"""Shows what must differ between copies of one image, and what must not.

With threads that wait and, on request, with processes that serve.
"""

import json
import mmap
import os
import random
import socket
import ssl
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer

WORKERS = int(os.environ.get("WORKERS", "0"))
ticks = 0
# OpenSSL's generator is seeded before the freeze.
ssl.RAND_bytes(16)


def tick():
    """A thread that is asleep when the program is frozen."""
    global ticks
    while True:
        time.sleep(0.01)
        ticks += 1


def filled(area):
    """Fills it page by page, each with its number."""
    for page in range(len(area) // 4096):
        area[page * 4096] = page % 251
    return area


# Private memory that is in the image: it grows in every copy.
GROWN_TO = [24, 64, 200, 90, 300]
memory = filled(mmap.mmap(-1, 16 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def grown():
    """What of the memory is not as it was filled, after each of several mremap(2)."""
    lost = []
    for pages in GROWN_TO:
        had = len(memory) // 4096
        memory.resize(pages * 4096)
        for page in range(pages):
            if memory[page * 4096] != (page % 251 if page < had else 0):
                lost.append((pages, page))
        filled(memory)
    memory.resize(16 * 4096)
    return lost


def identity():
    random.seed()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    ticked = ticks
    time.sleep(0.05)
    return {
        "unique": {
            "urandom": os.urandom(16).hex(),
            "openssl": ssl.RAND_bytes(16).hex(),
            "random": random.random(),
            "uuid4": str(uuid.uuid4()),
            "boot_id": boot_id,
        },
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "time": time.time(),
        "threads": threading.active_count(),
        "ticked": ticks - ticked,
        "lost": grown(),
        "greeting": os.environ.get("GREETING"),
        "limit": open("/sys/fs/cgroup/memory.max", encoding="ascii").read().strip(),
    }


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(identity()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments):
        pass


server = HTTPServer(("0.0.0.0", 8080), Handler)
for _ in range(WORKERS):
    if os.fork() == 0:
        break
else:
    if WORKERS:
        # The parent only waits for its children.
        os.wait()
        sys.exit(1)
for _ in range(3):
    threading.Thread(target=tick, daemon=True).start()
server.serve_forever()
