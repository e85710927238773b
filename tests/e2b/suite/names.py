"""Answers DNS for the suite: every name below a domain is one address of this host.

    names.py ADDRESS DOMAIN

Listens at ADDRESS, port 53. Other names do not exist.
"""

import socket
import struct
import sys

address, domain = sys.argv[1:]
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind((address, 53))
while True:
    asked, client = listener.recvfrom(512)
    labels, at = [], 12
    while at < len(asked) and asked[at]:
        labels.append(asked[at + 1 : at + 1 + asked[at]].decode("ascii", "replace").lower())
        at += 1 + asked[at]
    question = asked[12 : at + 5]
    if len(question) < 5:
        continue
    (kind,) = struct.unpack(">H", question[-4:-2])
    is_ours = ".".join(labels).endswith(domain)
    answer = b""
    if is_ours and kind == 1:
        answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton(address)
    flags = 0x8180 if is_ours else 0x8183
    head = asked[:2] + struct.pack(">HHHHH", flags, 1, 1 if answer else 0, 0, 0)
    listener.sendto(head + question + answer, client)
