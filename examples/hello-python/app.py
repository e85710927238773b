"""A web server made of nothing but the standard library.

Nothing in it knows about Thaw, except that `/random` shows what Thaw promises
about randomness: copies of one frozen image draw different numbers.
"""

import json
import os
import random
import time
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit


def greeting(query):
    name = query.get("name", ["you"])[0]
    return f"{os.environ.get('GREETING', 'Hello!')} Nice to meet {name}.\n"


def random_values(_query):
    """Four sources that must differ between two thawed copies."""
    random.seed()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return {
        "urandom": os.urandom(16).hex(),
        "random": random.random(),
        "uuid4": str(uuid.uuid4()),
        "boot_id": boot_id,
    }


def times(_query):
    return {
        "time": time.time(),
        "monotonic": time.monotonic(),
        "boottime": time.clock_gettime(time.CLOCK_BOOTTIME),
    }


def environment(_query):
    return dict(os.environ)


REQUESTS = 0


def process(_query):
    """Who serves this: `requests` counts those this very process has served."""
    return {"pid": os.getpid(), "requests": REQUESTS, "hostname": os.uname().nodename}


def slow(query):
    """Answers late: for trying out the function's timeout."""
    time.sleep(float(query.get("seconds", ["1"])[0]))
    return "That took a while.\n"


def die(_query):
    """Ends the process before it answers: the gateway says 502."""
    os._exit(3)


ROUTES = {
    "/": greeting,
    "/random": random_values,
    "/time": times,
    "/env": environment,
    "/pid": process,
    "/slow": slow,
    "/exit": die,
}


class Handler(BaseHTTPRequestHandler):
    """Serves ROUTES, and echoes what is posted to /echo."""

    def do_GET(self):
        global REQUESTS
        REQUESTS += 1
        url = urlsplit(self.path)
        route = ROUTES.get(url.path)
        if route is None:
            self.reply(404, {"error": f"there is no {url.path} here", "try": sorted(ROUTES)})
            return
        self.reply(200, route(parse_qs(url.query)))

    def do_POST(self):
        global REQUESTS
        REQUESTS += 1
        length = int(self.headers.get("Content-Length", "0"))
        self.reply(200, self.rfile.read(length))

    def reply(self, status, value):
        if isinstance(value, bytes):
            body, kind = value, "application/octet-stream"
        elif isinstance(value, str):
            body, kind = value.encode(), "text/plain; charset=utf-8"
        else:
            body, kind = (json.dumps(value) + "\n").encode(), "application/json"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    port = int(os.environ.get("PORT", "8080"))
    HTTPServer(("0.0.0.0", port), Handler).serve_forever()
