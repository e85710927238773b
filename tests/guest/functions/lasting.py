"""Numbers all that it is told, whoever says it. Clients of HTTP: /count, /hold/SECONDS, and an
upgrade to `lines`. Others, and those after the upgrade, send lines, and get each back with its
number."""

import os
import socketserver
import threading
import time

said = 0
lock = threading.Lock()


def number():
    global said
    with lock:
        said += 1
        return said


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        while line := self.rfile.readline():
            if not line.startswith(b"GET "):
                self.answer_line(line)
            elif not self.answer_request(line.split()[1].decode()):
                return

    def answer_line(self, line):
        self.wfile.write(b"%d %s" % (number(), line))

    def answer_request(self, path):
        head = {}
        while (line := self.rfile.readline()).strip():
            name, _, value = line.decode().partition(":")
            head[name.lower()] = value.strip().lower()
        if head.get("upgrade") == "lines":
            switch = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: lines\r\n\r\n"
            self.wfile.write(switch)
            return True
        _, deed, *arguments = path.split("/")
        count = number()
        if deed == "hold":
            time.sleep(float(arguments[0]))
        body = b"%d\n" % count
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        return head.get("connection") != "close"


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    Server(("0.0.0.0", int(os.environ.get("PORT", "8080"))), Handler).serve_forever()
