"""Says hello, and on request uses all CPU time that it can get, with several processes."""

import os
from http.server import BaseHTTPRequestHandler, HTTPServer


def spin():
    for _ in range(4):
        if os.fork() == 0:
            break
    while True:
        pass


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/spin":
            spin()
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"hello\n")

    def log_message(self, *_):
        pass


HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
