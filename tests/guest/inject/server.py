"""A TLS server of the tests: writes down what it is asked, and never says what that was.

server.py CERTIFICATE KEY RECORD: prints its port; RECORD gets a line of JSON for each request.
"""

import base64
import hashlib
import http.server
import json
import ssl
import sys
import threading

certificate, key, record = sys.argv[1:]
lock = threading.Lock()
GO_ON = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def note(self, body=b""):
        headers = [[name.lower(), value] for name, value in self.headers.items()]
        line = {"method": self.command, "path": self.path, "headers": headers, "body": body.decode()}
        line["connection"] = self.client_address[1]
        with lock, open(record, "a") as file:
            file.write(json.dumps(line) + "\n")

    def do_GET(self):
        self.note()
        if self.path == "/events":
            return self.events()
        if self.path == "/go-on":
            GO_ON.set()
        if self.headers.get("Upgrade") == "websocket":
            return self.upgrade()
        if self.path == "/close":
            self.close_connection = True
        self.answer(b"seen\n")

    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.note(body[:100])
        self.answer(f"{len(body)} {hashlib.sha256(body).hexdigest()}\n".encode())

    do_PUT = do_POST
    do_TRACE = do_GET

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Alt-Svc", 'h3=":443"')
        self.end_headers()
        self.wfile.write(body)

    def events(self):
        """Two events; the second one comes when somebody has asked for /go-on."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"b\r\ndata: one\n\n\r\n")
        self.wfile.flush()
        GO_ON.wait(60)
        self.wfile.write(b"b\r\ndata: two\n\n\r\n0\r\n\r\n")

    def upgrade(self):
        """Then everything comes back in capitals, without frames."""
        accept = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        digest = hashlib.sha1(accept.encode()).digest()
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(digest).decode())
        self.end_headers()
        while line := self.rfile.readline():
            self.wfile.write(line.upper())
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_):
        pass


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def finish_request(self, request, address):
        # In the connection's own thread: a client that breaks off holds up nobody.
        try:
            super().finish_request(context.wrap_socket(request, server_side=True), address)
        except OSError:
            pass


server = Server(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
