"""A session at work: `bash`, in it a Python REPL with numpy, and a pool of PostgreSQL connections.

  GET /repl?EXPRESSION  what the REPL prints for it
  GET /bash             ends the REPL; what bash had in a variable all the while
  GET /pool             the server's process for each connection, and how often one was made anew
"""

import http.server
import json
import os
import socket
import struct
import subprocess
import threading
import urllib.parse

HOST, PORT, CONNECTIONS = "host.thaw.internal", int(os.environ["PGPORT"]), 3
lock = threading.Lock()


class Connection:
    """PostgreSQL's protocol, as far as a simple query takes it."""

    def __init__(self):
        self.socket = socket.create_connection((HOST, PORT), timeout=20)
        startup = struct.pack("!i", 196608) + b"user\0thaw\0database\0postgres\0\0"
        self.socket.sendall(struct.pack("!i", len(startup) + 4) + startup)
        self.until_ready()

    def read(self, length):
        data = b""
        while len(data) < length:
            more = self.socket.recv(length - len(data))
            if not more:
                raise ConnectionResetError("the server has closed the connection")
            data += more
        return data

    def until_ready(self):
        row = None
        while True:
            kind, length = struct.unpack("!ci", self.read(5))
            body = self.read(length - 4)
            if kind == b"E":
                raise RuntimeError(body)
            if kind == b"D":
                row = body[6:].decode()
            if kind == b"Z":
                return row

    def query(self, text):
        text = text.encode() + b"\0"
        self.socket.sendall(struct.pack("!ci", b"Q", len(text) + 4) + text)
        return self.until_ready()


class Pool:
    """Makes a connection anew that is lost."""

    def __init__(self):
        self.connections = [Connection() for _ in range(CONNECTIONS)]
        self.made_anew = 0

    def query(self, number, text):
        try:
            return self.connections[number].query(text)
        except OSError:
            self.made_anew += 1
            self.connections[number] = Connection()
            return self.connections[number].query(text)


class Session:
    def __init__(self):
        self.pool = Pool()
        self.bash = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.say("kept=of-bash; python3 -i -q -u")
        self.say("import numpy; squares = numpy.arange(100_000) ** 2")

    def say(self, line):
        self.bash.stdin.write(line.encode() + b"\n")
        self.bash.stdin.flush()

    def ask(self, line):
        self.say(line)
        return self.bash.stdout.readline().decode().strip()

    def answer(self, path, query):
        if path == "/repl":
            return self.ask(f"print({query})")
        if path == "/bash":
            self.say("exit()")
            return self.ask("echo $kept")
        servers = [self.pool.query(n, "SELECT pg_backend_pid()") for n in range(CONNECTIONS)]
        return {"servers": servers, "made_anew": self.pool.made_anew}


class Server(http.server.BaseHTTPRequestHandler):
    session = None

    def do_GET(self):
        with lock:
            Server.session = Server.session or Session()
            path, _, query = self.path.partition("?")
            said = Server.session.answer(path, urllib.parse.unquote(query))
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Server).serve_forever()
