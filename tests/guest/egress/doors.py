# Says how a connection to the port in the path ends, by the name of the host.
import http.server
import socket

from clients import outcome


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        host = ("10.0.2.2", int(self.path[1:]))
        connect = lambda: socket.create_connection(host, 10).getpeername()[0]
        body = outcome(connect).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
