"""concurrent.futures with threads, and asyncio with an executor."""

import asyncio
import concurrent.futures
import hashlib
import time


def digest(number):
    return hashlib.sha256(str(number).encode() * 1000).hexdigest()


def slow(number):
    time.sleep(0.01)
    return number


with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(list(pool.map(digest, range(4))))
    futures = [pool.submit(slow, number) for number in range(12)]
    print(sorted(future.result() for future in concurrent.futures.as_completed(futures)))
    failing = pool.submit(lambda: 1 // 0)
    print(type(failing.exception()).__name__)
    try:
        pool.submit(time.sleep, 0.3).result(timeout=0.01)
    except TimeoutError:
        print("timed out")


async def echo(reader, writer):
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()
    writer.close()


async def client(port, number):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = []
    for part in range(3):
        writer.write(f"client {number} line {part}\n".encode())
        lines.append((await reader.readline()).decode().strip())
    writer.close()
    await writer.wait_closed()
    return lines


async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for lines in await asyncio.gather(*(client(port, number) for number in range(5))):
        print(lines)
    server.close()
    loop = asyncio.get_running_loop()
    print(await asyncio.gather(*(loop.run_in_executor(None, slow, number) for number in range(6))))
    print(await asyncio.to_thread(digest, "thread"))
    try:
        await asyncio.wait_for(asyncio.sleep(10), 0.01)
    except asyncio.TimeoutError:
        print("timed out")
    events = asyncio.Queue()
    loop.call_soon_threadsafe(events.put_nowait, "from a thread")
    print(await events.get())
    print((await loop.getaddrinfo("localhost", 80, family=2, type=1))[0][4])


asyncio.run(main())
