"""Listens for each family with a socket of its own, as asyncio does: that of `::` is IPV6_V6ONLY."""

import asyncio
import os


def answering(family):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        peer = writer.get_extra_info("peername")[0]
        text = f"{family} from {peer}\n".encode()
        head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        await writer.drain()
        writer.close()

    return answer


async def main():
    addresses = {"::": "IPv6", "0.0.0.0": "IPv4"}
    servers = [
        await asyncio.start_server(answering(family), address, 8080)
        for address, family in addresses.items()
        if family in os.environ["FAMILIES"]
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


asyncio.run(main())
