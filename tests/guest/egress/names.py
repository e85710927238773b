# Says which addresses the name in the path has.
import http.server
import socket
import socketserver


def addresses(name):
    try:
        found = socket.getaddrinfo(name, 80, socket.AF_INET, socket.SOCK_STREAM)
        return " ".join(sorted({address[0] for *_, address in found}))
    except socket.gaierror as error:
        return {socket.EAI_AGAIN: "failed", socket.EAI_NONAME: "none"}.get(error.errno, str(error))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = addresses(self.path[1:]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


Server(("0.0.0.0", 8080), Handler).serve_forever()
