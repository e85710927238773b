"""A protocol in which the server speaks first."""

import socketserver


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"who are you?\n")
        name = self.rfile.readline().strip().decode()
        self.wfile.write(f"hello {name}\n".encode())


socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("", 2525), Handler).serve_forever()
