"""Calls the example through a gateway: client.py [ADDRESS [CALLS]]

With CALLS, says how long so many take, one after the other, and how fast messages of a stream come."""

import sys
import time

import grpc

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8080"
calls = int(sys.argv[2]) if len(sys.argv) > 2 else 0
# The authority names the function, as `Host` does for HTTP/1.1.
options = [("grpc.default_authority", "grpc-python")]
with grpc.insecure_channel(address, options=options) as channel:

    def method(kind, name):
        return kind(f"/example.Greeter/{name}", str.encode, bytes.decode)

    greet, count = method(channel.unary_unary, "Greet"), method(channel.unary_stream, "Count")
    print(greet("Ada"))
    print(*count("3"))
    print(*method(channel.stream_stream, "Talk")(iter(["Ada", "Grace"])))

    def seconds(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    if calls:
        took = sorted(seconds(lambda: greet("Ada")) for _ in range(calls))
        middle, late = took[calls // 2], took[calls * 99 // 100]
        print(f"{calls} calls: p50 {middle * 1e6:.0f} µs, p99 {late * 1e6:.0f} µs")
        rate = 5000 / seconds(lambda: list(count("5000")))
        print(f"a stream of 5000 messages: {rate:.0f} a second")
