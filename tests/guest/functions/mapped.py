"""Two processes with thousands of separate mappings each, and memory that they share."""

import ctypes
import mmap
import os
from http.server import BaseHTTPRequestHandler, HTTPServer

PAGES = 2500
PAGE = mmap.PAGESIZE

libc = ctypes.CDLL(None, use_errno=True)
area = mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))


def write(salt):
    """Fills every second page, between pages that cannot be written to."""
    for page in range(0, PAGES, 2):
        area[page * PAGE : page * PAGE + 4] = (page + salt).to_bytes(4, "little")


def read():
    """The sum of what is in all pages."""
    pages = (area[page * PAGE : page * PAGE + 4] for page in range(PAGES))
    return sum(int.from_bytes(page, "little") for page in pages)


# Shared by both, and zero but for a few pages far from each other.
shared = mmap.mmap(-1, 1 << 24)
PLACES = [0, 1 << 20, (1 << 24) - PAGE]


def count():
    """Adds one at each place, and returns what is there, the rest being zero."""
    for place in PLACES:
        shared[place] += 1
    return [shared[place] for place in PLACES] + [sum(shared[:]) - sum(shared[p] for p in PLACES)]


write(0)
count()
for page in range(1, PAGES, 2):
    address = ctypes.c_void_p(start + page * PAGE)
    if libc.mprotect(address, ctypes.c_size_t(PAGE), mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), "mprotect")

to_child, from_parent = os.pipe(), os.pipe()
if os.fork() == 0:
    write(1)
    while os.read(to_child[0], 1):
        write(2)
        count()
        os.write(from_parent[1], read().to_bytes(8, "little"))


class Handler(BaseHTTPRequestHandler):
    """Answers with the sums of both processes, the child's after it wrote."""

    def do_GET(self):
        os.write(to_child[1], b"?")
        child = int.from_bytes(os.read(from_parent[0], 8), "little")
        body = f"{read()} {child} {count()}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
