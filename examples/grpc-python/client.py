"""Calls the example through a gateway: client.py [ADDRESS]"""

import sys

import grpc

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8080"
# The authority names the function, as `Host` does for HTTP/1.1.
options = [("grpc.default_authority", "grpc-python")]
with grpc.insecure_channel(address, options=options) as channel:

    def method(kind, name):
        return kind(f"/example.Greeter/{name}", str.encode, bytes.decode)

    print(method(channel.unary_unary, "Greet")("Ada"))
    print(*method(channel.unary_stream, "Count")("3"))
    print(*method(channel.stream_stream, "Talk")(iter(["Ada", "Grace"])))
