# What the functions of this directory have in common.
import errno
import socket


def call(port):
    """A connection to an echo server of the host, which has answered."""
    s = socket.create_connection(("host.thaw.internal", port), 10)
    s.sendall(b"hello")
    assert s.recv(5) == b"hello"
    return s


def outcome(action):
    """What `action` returns, or the name of its error."""
    try:
        return str(action())
    except OSError as error:
        return errno.errorcode[error.errno]
