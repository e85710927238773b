"""A server that has restricted its own system calls (seccomp(2)) before it is frozen: mkdir(2) fails with
77, and getppid(2) sends a SIGSYS, which ends a child."""

import ctypes
import http.server
import os
import struct

MKDIR, GETPPID, SECCOMP = 83, 110, 317
ERRNO, TRAP, ALLOW = 0x50000, 0x30000, 0x7FFF0000
PR_SET_NO_NEW_PRIVS = 38
libc = ctypes.CDLL(None, use_errno=True)


def restrict(number, verdict):
    load, equal, give = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, verdict), (give, 0, 0, ALLOW)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    header = struct.pack("H6xQ", len(program), ctypes.addressof(text))
    if libc.syscall(SECCOMP, 1, 0, header):
        raise OSError(ctypes.get_errno(), "seccomp")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        try:
            os.mkdir("/tmp/made")
            said = "made"
        except OSError as error:
            said = f"error {error.errno}"
        child = os.fork()
        if child == 0:
            os.getppid()
            os._exit(0)
        said += f", signal {os.WTERMSIG(os.waitpid(child, 0)[1])}"
        with open("/proc/self/status") as status:
            shown = dict(line.rstrip().split(":\t") for line in status if "Seccomp" in line)
        said += f", mode {shown['Seccomp']} with {shown['Seccomp_filters']}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, *_):
        pass


libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
restrict(MKDIR, ERRNO | 77)
restrict(GETPPID, TRAP)
http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
