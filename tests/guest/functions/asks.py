# Asks for its freeze before it listens, and says which copy it is.
import http.server
import random

with open("/dev/thaw", "w") as hook:
    hook.write("freeze\n")
random.seed()
with open("/dev/thaw") as hook:
    generation = hook.read().strip()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{generation} {random.random()}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
