"""Reaches out of a sandbox in every way, and prints what comes of it.

Arguments: a port of the host's loopback where an echo server answers on TCP and
UDP and that is allowed, one that is not, and one that is allowed and closed.
"""
import errno
import select
import socket
import struct
import sys

allowed, forbidden, closed = (int(argument) for argument in sys.argv[1:])
HOST, RESOLVER = "10.0.2.2", "10.0.2.3"


def outcome(action):
    try:
        return action()
    except OSError as error:
        return errno.errorcode.get(error.errno, error.strerror)


def tcp(address, timeout=10):
    with socket.socket() as s:
        s.settimeout(timeout)
        s.connect(address)
        return "connected"


# A whole conversation, both halves closed in turn.
with socket.create_connection(("host.thaw.internal", allowed), 10) as s:
    print("names", s.getsockname()[0], s.getpeername() == (HOST, allowed))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.sendall(b"x" * 300_000)
    got = 0
    while got < 300_000:
        got += len(s.recv(65536))
    s.shutdown(socket.SHUT_WR)
    print("echoed", got, "then", s.recv(10))

print("forbidden port", outcome(lambda: tcp((HOST, forbidden))))
print("forbidden address", outcome(lambda: tcp(("192.0.2.1", allowed))))
print("closed port", outcome(lambda: tcp((HOST, closed))))
print("host's own loopback", outcome(lambda: tcp(("127.0.0.1", allowed))))

# connect(2) that does not wait.
for name, address in (("allowed", (HOST, allowed)), ("closed", (HOST, closed)),
                      ("forbidden", ("192.0.2.1", allowed))):
    with socket.socket() as s:
        s.setblocking(False)
        began = errno.errorcode[s.connect_ex(address)]
        poll = select.poll()
        poll.register(s, select.POLLOUT)
        [(_, events)] = poll.poll(10_000)
        error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        print("at once", name, began, events, errno.errorcode.get(error, error))
        if not error:
            print("again", errno.errorcode.get(s.connect_ex(address), 0),
                  errno.errorcode[s.connect_ex(address)])

# UDP, to whom it may concern and to one peer.
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as u:
    u.settimeout(10)
    u.sendto(b"one", (HOST, allowed))
    data, sender = u.recvfrom(100)
    print("udp", data, sender == (HOST, allowed))
    u.sendto(b"", (HOST, allowed))
    print("udp empty", u.recvfrom(100)[0])
    print("udp forbidden", outcome(lambda: u.sendto(b"x", ("192.0.2.1", 53))))
    u.connect((HOST, allowed))
    print("udp own", u.getsockname()[0])
    u.send(b"a long datagram")
    print("udp cut", u.recv(6))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as u:
    u.settimeout(10)
    u.connect((HOST, closed))
    u.send(b"x")
    print("udp closed", outcome(lambda: u.recv(10)))


# DNS, by hand and by the C library.
def question(name, kind):
    labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split("."))
    return b"\x12\x34\x01\0\0\1\0\0\0\0\0\0" + labels + b"\0" + struct.pack(">HH", kind, 1)


def answer(message):
    _, flags, _, answers = struct.unpack(">HHHH", message[:8])
    return flags & 15, answers


with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as u:
    u.settimeout(10)
    u.connect((RESOLVER, 53))
    for name, kind in (("host.thaw.internal", 1), ("host.thaw.internal", 28),
                       ("forbidden.example.com", 1)):
        u.send(question(name, kind))
        print("asked", name, kind, answer(u.recv(512)))
    u.send(b"nonsense")
with socket.create_connection((RESOLVER, 53), 10) as s:
    message = question("localhost", 1)
    s.sendall(struct.pack(">H", len(message)) + message)
    length = struct.unpack(">H", s.recv(2))[0]
    print("asked over tcp", answer(s.recv(length)))
for name in ("host.thaw.internal", "forbidden.example.com"):
    try:
        found = sorted({a[4][0] for a in socket.getaddrinfo(name, allowed, socket.AF_INET)})
        print("looked up", name, found)
    except socket.gaierror as error:
        print("looked up", name, error.args[0] == socket.EAI_NONAME)

# The address of the way out is the sandbox's own, too.
with socket.create_server(("10.0.2.15", 0)) as listener:
    with socket.create_connection(listener.getsockname()) as s:
        print("own address", s.getsockname()[0], listener.accept()[1][0])
