"""A server of gRPC: greets by one answer, by many, and in a conversation. Its messages are text, so
that it needs no generated code."""

import os
from concurrent import futures

import grpc


def greet(name, context):
    if not name:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "who is there?")
    return f"Hello, {name}!"


def count(text, context):
    for number in range(int(text)):
        yield str(number)


def talk(names, context):
    for name in names:
        yield f"Hello, {name}!"


METHODS = {
    "Greet": grpc.unary_unary_rpc_method_handler(greet, bytes.decode, str.encode),
    "Count": grpc.unary_stream_rpc_method_handler(count, bytes.decode, str.encode),
    "Talk": grpc.stream_stream_rpc_method_handler(talk, bytes.decode, str.encode),
}

server = grpc.server(
    futures.ThreadPoolExecutor(max_workers=16),
    handlers=[grpc.method_handlers_generic_handler("example.Greeter", METHODS)],
)
server.add_insecure_port(f"0.0.0.0:{os.environ.get('PORT', '8080')}")
server.start()
server.wait_for_termination()
