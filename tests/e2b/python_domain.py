"""E2B's Python SDK with names of hosts and TLS: E2B_DOMAIN is a name that leads nowhere, so that a
proxy takes each connection to THAW_E2B_PORT of this host."""

import os
import socket
import threading

from e2b import Sandbox

named = []


def pipe(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def connect(client):
    reader = client.makefile("rb", buffering=0)
    head = [reader.readline()]
    while head[-1] not in (b"\r\n", b""):
        head.append(reader.readline())
    named.append(head[0].split()[1].decode())
    server = socket.create_connection(("127.0.0.1", int(os.environ["THAW_E2B_PORT"])))
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    threading.Thread(target=pipe, args=(client, server), daemon=True).start()
    pipe(server, client)


def serve(listener):
    while True:
        client, _ = listener.accept()
        threading.Thread(target=connect, args=(client,), daemon=True).start()


listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
domain = os.environ["E2B_DOMAIN"]

box = Sandbox.create(proxy=proxy)
assert box.get_host(3000) == f"3000-{box.sandbox_id}.{domain}", box.get_host(3000)
assert box.commands.run("echo over TLS").stdout == "over TLS\n"
box.files.write("/tmp/x", "y")
assert box.files.read("/tmp/x") == "y"
assert box.kill()
assert f"api.{domain}:443" in named, named
assert f"49983-{box.sandbox_id}.{domain}:443" in named, named
print("names and TLS work")
