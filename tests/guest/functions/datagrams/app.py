"""Answers each datagram; knows how many it has seen, and from whom."""

import socket

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 5353))
seen = 0
clients = set()
while True:
    data, client = server.recvfrom(65536)
    seen += 1
    clients.add(client)
    if data == b"quit":
        break
    if data == b"size":
        server.sendto(b"y" * 60000, client)
        continue
    text = f"{data.decode()}: datagram {seen} of {len(clients)} from port {client[1]}"
    server.sendto(text.encode(), client)
