"""Sockets, selectors and servers in one thread, with connections to itself."""
import errno
import http.client
import http.server
import io
import os
import select
import selectors
import socket
import socketserver
import tempfile
import time

print("-- socketpair and select")
a, b = socket.socketpair()
print(select.select([a], [a], [], 0) == ([], [a], []))
b.sendall(b"ping")
print(select.select([a], [], [], 1) == ([a], [], []), a.recv(10))
a.setblocking(False)
try:
    a.recv(1)
except BlockingIOError as error:
    print(errno.errorcode[error.errno])
a.settimeout(0.05)
start = time.monotonic()
try:
    a.recv(1)
except TimeoutError as error:
    print("timed out", time.monotonic() - start >= 0.05)
b.close()
print(a.recv(10))
a.close()

print("-- selectors")
for kind in (selectors.EpollSelector, selectors.PollSelector, selectors.SelectSelector):
    with kind() as selector:
        a, b = socket.socketpair()
        selector.register(a, selectors.EVENT_READ, "a")
        selector.register(b, selectors.EVENT_READ | selectors.EVENT_WRITE, "b")
        print(kind.__name__, sorted((key.data, events) for key, events in selector.select(0)))
        b.send(b"x")
        selector.modify(b, selectors.EVENT_READ, "b")
        print(sorted((key.data, events) for key, events in selector.select(1)))
        selector.unregister(a)
        print(selector.select(0.01), len(selector.get_map()))
        a.close()
        b.close()
print(selectors.DefaultSelector.__name__)

print("-- a TCP server and its client")
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
client = socket.create_connection(("127.0.0.1", port), timeout=5)
connection, address = server.accept()
print(address == client.getsockname(), connection.getsockname()[1] == port, connection.family.name)
client.sendall(b"line one\nline two\n")
with connection.makefile("rb") as lines:
    print(lines.readline(), lines.readline())
connection.sendall(b"z" * 100000)
connection.shutdown(socket.SHUT_WR)
received = 0
while piece := client.recv(65536):
    received += len(piece)
print(received)
client.close()
print(connection.recv(1))
connection.close()
server.close()
try:
    socket.create_connection(("127.0.0.1", port), timeout=5)
except OSError as error:
    print(errno.errorcode[error.errno])

print("-- socketserver")


class Upper(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(self.rfile.readline().upper())


with socketserver.TCPServer(("127.0.0.1", 0), Upper) as server:
    client = socket.create_connection(server.server_address)
    client.sendall(b"shout\n")
    server.handle_request()
    print(client.recv(100), client.recv(100))
    client.close()
    server.timeout = 0.02
    server.handle_timeout = lambda: print("nobody came")
    server.handle_request()

directory = tempfile.mkdtemp(prefix="thaw-guest-")
path = os.path.join(directory, "socket")
with socketserver.UnixStreamServer(path, Upper) as server:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    client.sendall(b"unix\n")
    server.handle_request()
    print(client.recv(100))
    client.close()
os.unlink(path)
os.rmdir(directory)

print("-- http.server")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"you asked for {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
    client = socket.create_connection(server.server_address)
    client.sendall(b"GET /path HTTP/1.0\r\nHost: x\r\n\r\n")
    server.handle_request()
    response = http.client.HTTPResponse(client)
    response.begin()
    print(response.status, response.read())
    client.close()
    for request in (b"GARBAGE\r\n\r\n", b"POST / HTTP/1.0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        client = socket.create_connection(server.server_address)
        client.sendall(request)
        server.handle_request()
        answer = b""
        while piece := client.recv(4096):
            answer += piece
        print(request, answer.split(b"\r\n")[0][:40])
        client.close()

print("-- names and options")
print(socket.inet_aton("127.0.0.1"), socket.inet_ntop(socket.AF_INET6, b"\0" * 15 + b"\1"))
print(socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)[0][4])
with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    print(s.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR), s.getblocking(), s.type.name)
    try:
        s.bind(("192.0.2.1", 80))
    except OSError as error:
        print(errno.errorcode[error.errno])
