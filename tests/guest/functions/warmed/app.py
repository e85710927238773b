"""Remembers how many requests it has had, and which copy it is."""

import http.server

count = 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        with open("/dev/thaw") as device:
            generation = device.read().strip()
        text = f"request {count} of generation {generation}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("", 8080), Handler).serve_forever()
