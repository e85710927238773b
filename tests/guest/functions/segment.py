"""Sets %gs before it is frozen, and answers with what it reads there."""

import ctypes
import mmap
from http.server import BaseHTTPRequestHandler, HTTPServer

SYS_ARCH_PRCTL = 158
ARCH_SET_GS = 0x1001

block = ctypes.create_string_buffer(b"\x2a" * 256, 256)
ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_SET_GS, ctypes.c_void_p(ctypes.addressof(block)))

# mov rax, gs:[0]; ret
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\x65\x48\x8b\x04\x25\x00\x00\x00\x00\xc3")
read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(code)))


class Handler(BaseHTTPRequestHandler):
    """Answers with the word."""

    def do_GET(self):
        body = f"{read():x}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
