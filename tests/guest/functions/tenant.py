"""Does what the path says: /hold/SECONDS, /spin/SECONDS, /keep/MEBIBYTES/SECONDS or
/connect/PORT/COUNT/SECONDS."""

import errno
import http.server
import socket
import time


def spin(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return "spun"


def keep(mebibytes, seconds):
    kept = bytearray(int(mebibytes) << 20)
    # Every page is written to.
    kept[::4096] = b"x" * len(kept[::4096])
    time.sleep(seconds)
    return f"kept {len(kept) >> 20}"


def connect(port, count, seconds):
    made, outcomes = [], []
    for _ in range(int(count)):
        try:
            made.append(socket.create_connection(("host.thaw.internal", int(port))))
            outcomes.append("made")
        except OSError as error:
            outcomes.append(errno.errorcode.get(error.errno, "?"))
    time.sleep(seconds)
    for connection in made:
        connection.close()
    return " ".join(outcomes)


def hold(seconds):
    time.sleep(seconds)
    return "held"


DEEDS = {"spin": spin, "keep": keep, "connect": connect, "hold": hold}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        _, deed, *numbers = self.path.split("/")
        text = DEEDS[deed](*map(float, numbers)) if deed else "here"
        body = (text + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
