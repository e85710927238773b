"""A server that tells what it finds in /run/secrets.

    /            the names and values, and what was there at the start
    /quiet       answers without looking
    /facts       how the directory looks
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

PLACE = "/run/secrets"


def values():
    found = {}
    for name in sorted(os.listdir(PLACE)):
        with open(os.path.join(PLACE, name), "rb") as file:
            found[name] = file.read().decode("latin-1")
    return found


def errno_of(action):
    try:
        action()
    except OSError as error:
        return error.errno
    return 0


def facts():
    names = sorted(os.listdir(PLACE))
    path = os.path.join(PLACE, names[0])
    with open(path, "rb") as file:
        file.seek(2)
        rest = file.read(3).decode()
    return {
        "sizes": [os.stat(os.path.join(PLACE, name)).st_size for name in names],
        "rest": rest,
        "write": errno_of(lambda: open(path, "wb")),
        "create": errno_of(lambda: open(os.path.join(PLACE, "new"), "wb")),
        "missing": errno_of(lambda: open(os.path.join(PLACE, "none"), "rb")),
        "mode": oct(os.stat(path).st_mode & 0o777),
    }


AT_START = values()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/quiet":
            answer = {}
        elif self.path == "/facts":
            answer = facts()
        else:
            answer = {"now": values(), "at_start": AT_START}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments):
        pass


server = HTTPServer(("0.0.0.0", 8080), Handler)
# With an argument, a worker serves that is a process of its own.
if len(sys.argv) > 1 and (worker := os.fork()):
    os.waitpid(worker, 0)
else:
    server.serve_forever()
