"""Says where its memory lies; crashes when asked to."""

import ctypes
from http.server import BaseHTTPRequestHandler, HTTPServer

BUFFER = ctypes.create_string_buffer(1 << 20)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            ctypes.string_at(8)
        text = f"{ctypes.addressof(BUFFER):#x}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


HTTPServer(("", 8080), Handler).serve_forever()
