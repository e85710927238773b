"""Prints what it is asked to, a little or without end."""

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import unquote


def flood(piece):
    while True:
        os.write(1, piece)


FLOODS = {
    "/flood/empty": b"\n" * 65536,
    "/flood/single": b"\n",
    "/flood/long": b"x" * 65536,
    "/flood/lines": (b"y" * 100 + b"\n") * 600,
}


class Handler(BaseHTTPRequestHandler):
    """Answers with the process id that the guest knows, which is of no interest."""

    def do_GET(self):
        if self.path in FLOODS:
            threading.Thread(target=flood, args=(FLOODS[self.path],), daemon=True).start()
        elif self.path.startswith("/say/"):
            text = unquote(self.path[len("/say/"):]).encode()
            os.write(1, b"out " + text + b"\n")
            os.write(2, b"err " + text + b"\n")
        elif self.path == "/exit":
            os.write(1, b"last words, without an end")
            os._exit(3)
        elif self.path == "/hang":
            time.sleep(600)
        elif self.path == "/eat":
            eaten = [bytearray(b"x" * (1 << 20)) for _ in range(4096)]
            eaten.clear()
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"ok\n")

    def log_message(self, *_):
        pass


HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
