"""Writes a file before it is frozen, and more for every request."""

import os
from http.server import BaseHTTPRequestHandler, HTTPServer

with open("/tmp/before", "wb") as file:
    file.write(b"x" * 5000)


class Handler(BaseHTTPRequestHandler):
    """Answers with what became of the files."""

    def do_GET(self):
        data = os.urandom(9_000_000)
        with open("/tmp/after", "wb") as file:
            file.write(data)
        with open("/tmp/after", "rb") as file:
            rewritten = file.read() == data
        sizes = [os.path.getsize("/tmp/" + name) for name in ("before", "after")]
        body = f"before {sizes[0]}, after {sizes[1]}, rewritten {rewritten}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
