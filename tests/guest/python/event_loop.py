"""asyncio on the default event loop, and what travels beside bytes on sockets."""
import asyncio
import errno
import os
import select
import signal
import socket
import struct
import tempfile
import time


async def shout(reader, writer):
    writer.write((await reader.readline()).upper())
    await writer.drain()
    writer.close()


class Datagrams(asyncio.DatagramProtocol):
    def __init__(self, got):
        self.got = got

    def datagram_received(self, data, address):
        self.got.set_result(data)


async def main():
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def client(number):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello %d\n" % number)
        answer = await reader.read()
        writer.close()
        return answer

    print(await asyncio.gather(*[client(number) for number in range(20)]))
    server.close()
    await server.wait_closed()

    with tempfile.TemporaryDirectory(prefix="thaw-guest-") as directory:
        path = os.path.join(directory, "socket")
        server = await asyncio.start_unix_server(shout, path)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"unix\n")
        print(await reader.read())
        writer.close()
        server.close()

    signaled = loop.create_future()
    loop.add_signal_handler(signal.SIGUSR1, signaled.set_result, "signal")
    os.kill(os.getpid(), signal.SIGUSR1)
    print(await signaled)
    try:
        await asyncio.wait_for(asyncio.sleep(10), 0.05)
    except asyncio.TimeoutError:
        print("timed out")

    got = loop.create_future()
    transport, _ = await loop.create_datagram_endpoint(lambda: Datagrams(got), local_addr=("127.0.0.1", 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"datagram", transport.get_extra_info("sockname"))
        print(await got)
    transport.close()


print("-- asyncio")
asyncio.run(main())

print("-- descriptors and credentials")
a, b = socket.socketpair()
reader, writer = os.pipe()
socket.send_fds(a, [b"x"], [reader, writer])
data, fds, flags, _ = socket.recv_fds(b, 10, 5)
print(data, len(fds), flags)
os.write(fds[1], b"through a copy")
print(os.read(reader, 100))
socket.send_fds(a, [b"x"], [reader, writer, reader, writer])
data, ancillary, flags, _ = b.recvmsg(10, socket.CMSG_LEN(8))
print(data, [(level, kind, len(value)) for level, kind, value in ancillary], flags == socket.MSG_CTRUNC)
own = (os.getpid(), os.getuid(), os.getgid())
b.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
a.send(b"c")
data, ancillary, flags, _ = b.recvmsg(10, 200)
print(data, [(level, kind, struct.unpack("3i", value) == own) for level, kind, value in ancillary], flags)
print(struct.unpack("3i", a.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)) == own)

print("-- both families")
server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
port = server.getsockname()[1]
for address in ("127.0.0.1", "::1"):
    with socket.create_connection((address, port)):
        accepted, peer = server.accept()
        print(peer[0], peer[2:], accepted.getsockname()[0])
        accepted.close()

print("-- time limits")
a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 30000))
try:
    a.recv(1)
except OSError as error:
    print(errno.errorcode[error.errno])
a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))

print("-- edges")
epoll = select.epoll()
reader, writer = os.pipe()
epoll.register(reader, select.EPOLLIN | select.EPOLLET)
os.write(writer, b"x")
print(epoll.poll(0) == [(reader, select.EPOLLIN)], epoll.poll(0))
os.write(writer, b"x")
print(epoll.poll(0) == [(reader, select.EPOLLIN)])
os.close(writer)
print(epoll.poll(0) == [(reader, select.EPOLLIN | select.EPOLLHUP)])

print("-- interrupted waits")


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.02)
start = time.monotonic()
print(select.select([], [], [], 0.1), time.monotonic() - start >= 0.1)
signal.signal(signal.SIGALRM, stop)
for wait in (lambda: a.recv(1), lambda: select.select([a], [], []), lambda: epoll.poll(maxevents=1) and a.recv(1)):
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        wait()
    except Stop:
        print("stopped")
