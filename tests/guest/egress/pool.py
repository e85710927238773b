# Has connections when it is frozen, and says what has become of them afterwards.
import asyncio
import http.server
import os
import select
import socket

from clients import call, outcome

PORT = int(os.environ["ECHO_PORT"])
GONE = int(os.environ["GONE_PORT"])


def ready(s):
    return [len(found) for found in select.select([s], [s], [], 0)]


def echo(s, text):
    s.sendall(text)
    return s.recv(100)


async def connect():
    return await asyncio.open_connection("host.thaw.internal", PORT)


async def ask(reader, writer, text):
    writer.write(text)
    await writer.drain()
    return await asyncio.wait_for(reader.readexactly(len(text)), 10)


loop = asyncio.new_event_loop()
used, unused, waiting, gone = call(PORT), call(PORT), call(PORT), call(GONE)
stream = loop.run_until_complete(connect())
loop.run_until_complete(ask(*stream, b"before"))
# Its answer is on the way when the program is frozen, and nobody has read it.
waiting.sendall(b"lost")
waiting.recv(4, socket.MSG_PEEK)
own = used.getsockname()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        results = [
            ready(used),
            outcome(lambda: used.getpeername()[0]),
            used.getsockname() == own,
            used.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR),
            outcome(lambda: echo(used, b"again")),
            outcome(lambda: echo(used, b"and again")),
            loop.run_until_complete(ask(*stream, b"after")),
            outcome(lambda: waiting.recv(1)),
            outcome(lambda: gone.sendall(b"x") or gone.recv(1)),
            outcome(lambda: gone.recv(1)),
            ready(unused),
        ]
        body = "\n".join(map(str, results)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
