"""Says how a connection to each address ends: ADDRESS PORT, again and again."""
import errno
import socket
import sys

arguments = sys.argv[1:]
for address, port in zip(arguments[::2], arguments[1::2]):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as s:
        s.settimeout(10)
        print(address, errno.errorcode.get(s.connect_ex((address, int(port))), "connected"))
