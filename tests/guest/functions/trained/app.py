"""Counts its requests, and tells what it has open while it answers."""

import http.server
import os

count = 0
bodies = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(self.rfile.read(int(self.headers["content-length"])).decode())
        self.do_GET()

    def do_GET(self):
        global count
        count += 1
        status = int(self.path[1:] or "200")
        descriptors = ",".join(sorted(os.listdir("/proc/self/fd")))
        text = f"request {count}, open {descriptors}, read {bodies}\n".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("", 8080), Handler).serve_forever()
