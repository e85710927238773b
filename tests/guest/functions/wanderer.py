"""Touches another part of its memory for each path: /7 reads and writes the eighth of 64 blocks."""
import http.server

BLOCK = 256 << 10
blocks = [bytearray(bytes([number]) * BLOCK) for number in range(1, 65)]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        number = int(self.path[1:] or 0)
        block = blocks[number]
        total = sum(block[at] for at in range(0, BLOCK, 4096))
        for at in range(0, BLOCK // 2, 4096):
            block[at] = 0
        body = str(total // (BLOCK // 4096)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
