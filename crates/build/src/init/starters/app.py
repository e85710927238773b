"""Answers every request with a greeting. Python's own library is enough for that;
what else you need, name in requirements.txt."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

# What is done here is done once, when the function is built.
GREETING = "Hello from Python!"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        names = parse_qs(urlsplit(self.path).query).get("name", ["you"])
        body = f"{GREETING} Nice to meet {names[0]}.\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("", int(os.environ.get("PORT", "8080"))), Handler).serve_forever()
