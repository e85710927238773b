"""Keeps connections open, answers at length and takes bodies: for tests under load."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PIECE = bytes(range(256)) * 256


class Handler(BaseHTTPRequestHandler):
    """`/` greets, `/long` answers 2 MiB in a known pattern, a POST is answered by its length."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if urlsplit(self.path).path == "/long":
            self.head(32 * len(PIECE))
            for _ in range(32):
                self.wfile.write(PIECE)
        else:
            self.reply(b"Hello from keeper\n")

    def do_POST(self):
        length = int(self.headers.get("Content-Length", "0"))
        self.reply(b"%d bytes\n" % len(self.rfile.read(length)))

    def head(self, length):
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def reply(self, body):
        self.head(len(body))
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    port = int(os.environ.get("PORT", "8080"))
    ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()
