"""Asks to be frozen with a signal that it ignores, long before it listens."""

import http.server
import os
import signal
import threading

signal.signal(signal.SIGUSR2, signal.SIG_IGN)
# Somebody who waits is no reason to freeze a program that wants to be asked.
threading.Event().wait(0.2)
with open("/dev/thaw") as file:
    before = file.read().strip()
os.kill(os.getpid(), signal.SIGUSR2)
with open("/dev/thaw") as file:
    after = file.read().strip()
# The second time it is a signal like any other.
os.kill(os.getpid(), signal.SIGUSR2)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = f"copy {before} has become copy {after}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("", 8080), Handler).serve_forever()
