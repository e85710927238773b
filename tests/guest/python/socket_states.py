"""What sockets say in every state: readiness, errors, sharing of addresses."""
import ctypes
import errno
import os
import select
import signal
import socket
import struct


def attempt(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]


def readiness(sock):
    poll = select.poll()
    poll.register(sock, 0x2FFF)
    return [hex(events) for _, events in poll.poll(0)]


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def probe(sock):
    return [attempt(sock.send, b"x"), attempt(sock.recv, 1, socket.MSG_DONTWAIT), readiness(sock)]


print("-- unconnected")
for family in (socket.AF_INET, socket.AF_UNIX):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as sock:
            print(family.name, kind.name, readiness(sock), attempt(sock.send, b"x"), attempt(sock.getpeername),
                  attempt(sock.accept), attempt(sock.recv, 1, socket.MSG_DONTWAIT))

print("-- shutdown and close")
pairs = [("tcp", tcp_pair)] + [
    (kind.name, lambda kind=kind: socket.socketpair(socket.AF_UNIX, kind))
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
]
for name, make in pairs:
    for how in (socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR):
        a, b = make()
        a.shutdown(how)
        print(name, how, readiness(a), readiness(b), probe(b), probe(a))
    a, b = make()
    b.close()
    print(name, "closed", readiness(a), probe(a), probe(a))
    a, b = make()
    a.send(b"unread")
    b.send(b"sent")
    b.close()
    print(name, "closed with data", readiness(a), attempt(a.recv, 9, socket.MSG_DONTWAIT), probe(a), probe(a))

print("-- a connect that does not wait")
with socket.create_server(("127.0.0.1", 0)) as server:
    address = server.getsockname()
    with socket.socket() as sock:
        sock.setblocking(False)
        print([errno.errorcode.get(sock.connect_ex(address), 0) for _ in range(3)])
with socket.socket() as sock:
    sock.setblocking(False)
    print([errno.errorcode.get(sock.connect_ex(address), 0) for _ in range(3)])
    print(readiness(sock), sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), readiness(sock))

print("-- who may share an address")
options = ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,))
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for first in options:
        for second in options:
            results = []
            for hosts in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")):
                for listening in (False, True)[: 2 if kind == socket.SOCK_STREAM else 1]:
                    a, b = socket.socket(socket.AF_INET, kind), socket.socket(socket.AF_INET, kind)
                    for sock, wanted in ((a, first), (b, second)):
                        for option in wanted:
                            sock.setsockopt(socket.SOL_SOCKET, option, 1)
                    a.bind((hosts[0], 0))
                    if listening:
                        a.listen()
                    results.append(attempt(b.bind, (hosts[1], a.getsockname()[1])))
                    a.close()
                    b.close()
            print(kind.name, first, second, results)

print("-- never accepted")
server = socket.create_server(("127.0.0.1", 0))
clients = [socket.create_connection(server.getsockname()) for _ in range(3)]
server.close()
print([attempt(client.recv, 1) for client in clients])

print("-- datagrams")
a, b = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
a.bind(("127.0.0.1", 0))
b.connect(a.getsockname())
b.send(b"0123456789")
b.send(b"")
print(a.recvfrom(5, socket.MSG_TRUNC)[0], a.recv(10))
b.send(b"zz")
data, _, flags, sender = a.recvmsg(1)
print(data, flags == socket.MSG_TRUNC, sender == b.getsockname())
a.close()
print([probe(b) for _ in range(2)], attempt(b.sendto, bytes(65508), ("127.0.0.1", 9)))
a, b = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
a.bind("\0thaw-guest-states")
b.connect("\0thaw-guest-states")
b.setblocking(False)
sent = 0
while attempt(b.send, b"x") == 1:
    sent += 1
# How many there may be is a setting of the host (net.unix.max_dgram_qlen), or a matter of memory.
print(sent > 10, readiness(b), attempt(b.send, bytes(300000)))
a.setblocking(False)
while attempt(a.recv, 1) == b"x":
    sent -= 1
print(sent, readiness(b))
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
a.send(b"")
a.send(b"abc")
print(b.recvmsg(5), b.recvmsg(2))

print("-- signals that are read")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
mask = ctypes.c_uint64(1 << (signal.SIGUSR1 - 1) | 1 << (signal.SIGUSR2 - 1))
fd = ctypes.CDLL(None).signalfd(-1, ctypes.byref(mask), os.O_NONBLOCK | os.O_CLOEXEC)
print(attempt(os.read, fd, 128), attempt(os.read, fd, 10))
for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
print(select.select([fd], [], [], 0)[0] == [fd])
records = os.read(fd, 1024)
for at in range(0, len(records), 128):
    number, error, code, pid = struct.unpack_from("IiiI", records, at)
    print(signal.Signals(number).name, error, code, pid == os.getpid())
print(attempt(os.read, fd, 128))
