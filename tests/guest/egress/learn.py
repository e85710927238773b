"""Connects to an address before and after asking for its name.

Arguments: the address, which is also the name, and a port. What getaddrinfo(3)
makes of such a name needs no server.
"""
import errno
import socket
import struct
import sys

address, port = sys.argv[1], int(sys.argv[2])


def attempt():
    with socket.socket() as s:
        s.settimeout(10)
        return errno.errorcode.get(s.connect_ex((address, port)), "connected")


print(attempt())
labels = b"".join(bytes([len(l)]) + l.encode() for l in address.split("."))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as u:
    u.settimeout(10)
    u.connect(("10.0.2.3", 53))
    u.send(b"\x12\x34\x01\0\0\1\0\0\0\0\0\0" + labels + b"\0" + struct.pack(">HH", 1, 1))
    answer = u.recv(512)
print(socket.inet_ntoa(answer[-4:]) == address)
print(attempt())
