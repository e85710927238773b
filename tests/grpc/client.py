"""Calls a function by gRPC as any client does; prints the name of each check that has passed.

    client.py ADDRESS FUNCTION CHECK... [--ca FILE]
"""

import argparse
import sys
import threading
import time
from concurrent import futures

import grpc

SERVICE = "thaw.test.Echo"
OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
]
parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("function")
parser.add_argument("checks", nargs="+")
parser.add_argument("--ca")
arguments = parser.parse_args()


def connect():
    if arguments.ca is None:
        options = OPTIONS + [("grpc.default_authority", arguments.function)]
        return grpc.insecure_channel(arguments.address, options=options)
    with open(arguments.ca, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    options = OPTIONS + [("grpc.ssl_target_name_override", arguments.function)]
    return grpc.secure_channel(arguments.address, credentials, options=options)


channel = connect()


def unary(name, over=None):
    return (over or channel).unary_unary(f"/{SERVICE}/{name}")


def failure(call):
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise AssertionError("it did not fail")


def calls_of_every_kind():
    assert unary("Echo")(b"hello", timeout=60) == b"hello"
    assert unary("Echo")(b"", timeout=60) == b""
    pieces = list(channel.unary_stream(f"/{SERVICE}/Many")(b"100 1000", timeout=60))
    assert pieces == [bytes([at % 251]) * 1000 for at in range(100)]
    requests = (bytes(1000) for _ in range(100))
    assert channel.stream_unary(f"/{SERVICE}/Total")(requests, timeout=60) == b"100000"


def streams_go_both_ways():
    """Each request is sent only after the answer to the one before has come."""
    answered = threading.Semaphore(1)

    def requests():
        for at in range(50):
            assert answered.acquire(timeout=60)
            yield str(at).encode()

    answers = channel.stream_stream(f"/{SERVICE}/Chat")(requests(), timeout=60)
    for at, answer in enumerate(answers):
        assert answer == f"heard {at}".encode(), answer
        answered.release()
    assert at == 49


def metadata_goes_both_ways():
    call = unary("Echo").with_call
    _, ended = call(b"x", metadata=(("x-own", "mine"),), timeout=60)
    assert dict(ended.initial_metadata())["x-began"] == "mine"
    trailing = dict(ended.trailing_metadata())
    assert (trailing["x-ended"], trailing["x-raw-bin"]) == ("mine", b"\x00\xff"), trailing


def errors_have_their_code_and_message():
    for code in ["NOT_FOUND", "INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL"]:
        error = failure(lambda: unary("Fail")(f"{code}:what is wrong: ü %".encode(), timeout=60))
        assert error.code() == getattr(grpc.StatusCode, code), error
        assert error.details() == "what is wrong: ü %", error
    error = failure(lambda: unary("Nothing")(b"", timeout=60))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error


def waited_for(cancelled, waiting):
    """Waits until so many calls were cancelled in the function, and so many wait in it."""
    until = time.monotonic() + 60
    while (found := unary("Cancellations")(b"", timeout=60)) != f"{cancelled} {waiting}".encode():
        assert time.monotonic() < until, f"{found}, not {cancelled} {waiting}"
        time.sleep(0.05)


def deadlines_and_cancellations_reach_the_function():
    before = int(unary("Cancellations")(b"", timeout=60).split()[0])
    error = failure(lambda: unary("Wait")(b"", timeout=2))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error
    waited_for(before + 1, 0)
    waiting = unary("Wait").future(b"")
    waited_for(before + 1, 1)
    waiting.cancel()
    waited_for(before + 2, 0)
    # A client that goes away.
    other = connect()
    waiting = unary("Wait", other).future(b"")
    waited_for(before + 2, 1)
    other.close()
    waited_for(before + 3, 0)
    # In the middle of an answer.
    ticks = channel.unary_stream(f"/{SERVICE}/Tick")(b"1000")
    next(ticks)
    ticks.cancel()


def deadlines_end_calls():
    error = failure(lambda: unary("Wait")(b"", timeout=1))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error


def compressed_messages():
    text = b"the same again and again " * 1000
    answer = unary("Echo")(text, compression=grpc.Compression.Gzip, timeout=60)
    assert answer == text


def large_messages():
    message = bytes(range(256)) * (4 << 12)
    assert len(message) == 4 << 20
    for _ in range(3):
        assert unary("Echo")(message, timeout=60) == message


def a_hundred_calls_at_once():
    with futures.ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda at: unary("Echo")(str(at).encode(), timeout=60), range(100)))
    assert answers == [str(at).encode() for at in range(100)]
    started = [unary("Echo").future(bytes([at]), timeout=60) for at in range(100)]
    assert [call.result() for call in started] == [bytes([at]) for at in range(100)]


def nobody_is_there():
    """The gateway's own answers."""
    error = failure(lambda: unary("Echo")(b"", timeout=60))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error
    assert "nothing is served here" in error.details(), error
    assert dict(error.initial_metadata() or error.trailing_metadata())["thaw-error"] == "not_found"


def an_instance_that_dies():
    error = failure(lambda: unary("Hurt")(b"", timeout=60))
    assert error.code() == grpc.StatusCode.UNAVAILABLE, error
    assert unary("Echo")(b"again", timeout=60) == b"again"


def count():
    print(unary("Count")(b"", timeout=60).decode(), flush=True)


def ticks():
    """Prints what a stream says, until it ends."""
    for tick in channel.unary_stream(f"/{SERVICE}/Tick")(b"50", timeout=60):
        print(tick.decode(), flush=True)


def talk():
    """Prints an answer for each line that it reads, over one stream."""
    lines = (line.strip().encode() for line in sys.stdin)
    for answer in channel.stream_stream(f"/{SERVICE}/Chat")(lines):
        print(answer.decode(), flush=True)


def call_for_each_line():
    """Counts once for each line that it reads, over one channel."""
    for _ in sys.stdin:
        answer = unary("Count")(b"", timeout=60, wait_for_ready=True)
        print(answer.decode(), flush=True)


for check in arguments.checks:
    globals()[check]()
    if check not in ["count", "ticks", "talk", "call_for_each_line"]:
        print(check, flush=True)
channel.close()
