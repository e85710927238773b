"""A server that prints each request that it gets as a line of JSON.

    /         200
    /fail     500
    /flaky    500, and 200 from the third attempt on
    /refuse   422
    /slow     200, half a second later
    /stuck    200, ten minutes later
    /trickle  200, and a byte every tenth of a second without an end
"""

import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = {"method": self.command, "path": self.path, "headers": headers, "body": body.decode()}
        print(json.dumps(seen), flush=True)
        time.sleep({"/slow": 0.5, "/stuck": 600}.get(self.path.partition("?")[0], 0))
        attempt = int(headers.get("thaw-attempt", "1"))
        fails = self.path == "/fail" or self.path == "/flaky" and attempt < 3
        status = 500 if fails else 422 if self.path == "/refuse" else 200
        answer = json.dumps(seen).encode()
        if self.path == "/trickle":
            self.trickle()
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def trickle(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.1)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, *_arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


Server(("0.0.0.0", int(os.environ.get("PORT", "8080"))), Handler).serve_forever()
