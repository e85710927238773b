"""Touches more places of its memory with its first request than anybody wants to
remember: of a large area every other page, most by reading, some by writing."""
import http.server
import mmap

PAGE = 4096
READ, WRITTEN = 1 << 30, 64 << 20
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
area = mmap.mmap(-1, READ + WRITTEN, flags=FLAGS)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        total = sum(area[at] for at in range(0, READ, 2 * PAGE))
        for at in range(READ, READ + WRITTEN, 2 * PAGE):
            area[at] = 1
        body = str(total).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
