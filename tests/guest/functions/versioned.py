"""A server that keeps connections open and says which version of it answers.

    /        the version
    /fail    the version, with status 500
    /slow    the version, a second later
    /forever the first half of an answer, and never the second
"""

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VERSION = sys.argv[1]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/slow":
            time.sleep(1)
        body = VERSION.encode()
        fails = self.path == "/fail" or VERSION.startswith("bad")
        self.send_response(500 if fails else 200)
        self.send_header("Content-Length", str(len(body) * (1 + (self.path == "/forever"))))
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/forever":
            time.sleep(3600)

    def log_message(self, *_arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


Server(("0.0.0.0", int(os.environ.get("PORT", "8080"))), Handler).serve_forever()
