# Connects before it is frozen, and says what is left of that afterwards.
import http.server
import os
import socket

from clients import call, outcome

PORT = int(os.environ["ECHO_PORT"])


frozen = call(PORT)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.settimeout(10)
datagrams.connect(("10.0.2.2", PORT))
datagrams.send(b"before")
assert datagrams.recv(10) == b"before"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        results = [outcome(lambda: frozen.recv(1)), outcome(lambda: frozen.recv(1))]
        results.append(outcome(lambda: frozen.getpeername()))
        datagrams.send(b"after")
        results += [outcome(lambda: datagrams.recv(10)), outcome(lambda: call(PORT).getpeername())]
        results.append(outcome(lambda: socket.create_connection(("10.0.2.2", PORT + 1))))
        body = "\n".join(results).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
