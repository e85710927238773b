"""A server of gRPC whose messages are plain bytes, so that it needs no generated code."""

import os
import sys
import threading
import time
from concurrent import futures

import grpc

SERVICE = "thaw.test.Echo"
VERSION = sys.argv[1] if len(sys.argv) > 1 else "first"

lock = threading.Lock()
counter = 0
cancelled = 0
waiting = 0


def echo(request, context):
    sent = dict(context.invocation_metadata())
    context.send_initial_metadata((("x-began", sent.get("x-own", "")),))
    context.set_trailing_metadata((("x-ended", sent.get("x-own", "")), ("x-raw-bin", b"\x00\xff")))
    return request


def count(_, context):
    global counter
    with lock:
        counter += 1
        return f"{counter} {VERSION} {os.getpid()}".encode()


def fail(request, context):
    code, _, message = request.decode().partition(":")
    context.abort(getattr(grpc.StatusCode, code), message)


def many(request, context):
    number, size = map(int, request.split())
    for at in range(number):
        yield bytes([at % 251]) * size


def total(requests, context):
    return str(sum(len(request) for request in requests)).encode()


def chat(requests, context):
    for request in requests:
        yield b"heard " + request


def wait(_, context):
    global cancelled, waiting
    ended = threading.Event()
    context.add_callback(ended.set)
    waiting += 1
    ended.wait(60)
    with lock:
        waiting -= 1
        cancelled += 1
    return b""


def cancellations(_, context):
    return f"{cancelled} {waiting}".encode()


def tick(request, context):
    for at in range(int(request)):
        yield f"{at} {VERSION}".encode()
        time.sleep(0.1)


def hurt(_, context):
    os._exit(7)


METHODS = {
    "Echo": grpc.unary_unary_rpc_method_handler(echo),
    "Count": grpc.unary_unary_rpc_method_handler(count),
    "Fail": grpc.unary_unary_rpc_method_handler(fail),
    "Many": grpc.unary_stream_rpc_method_handler(many),
    "Total": grpc.stream_unary_rpc_method_handler(total),
    "Chat": grpc.stream_stream_rpc_method_handler(chat),
    "Wait": grpc.unary_unary_rpc_method_handler(wait),
    "Cancellations": grpc.unary_unary_rpc_method_handler(cancellations),
    "Tick": grpc.unary_stream_rpc_method_handler(tick),
    "Hurt": grpc.unary_unary_rpc_method_handler(hurt),
}
# `grpc.health.v1.Health/Check`: the field `status` is SERVING.
HEALTH = {"Check": grpc.unary_unary_rpc_method_handler(lambda request, context: b"\x08\x01")}

server = grpc.server(
    futures.ThreadPoolExecutor(max_workers=32),
    handlers=[
        grpc.method_handlers_generic_handler(SERVICE, METHODS),
        grpc.method_handlers_generic_handler("grpc.health.v1.Health", HEALTH),
    ],
    options=[
        ("grpc.max_receive_message_length", 16 << 20),
        ("grpc.max_send_message_length", 16 << 20),
        ("grpc.so_reuseport", 0),
    ],
    compression=grpc.Compression.Gzip,
)
server.add_insecure_port(f"0.0.0.0:{os.environ.get('PORT', '8080')}")
server.start()
server.wait_for_termination()
