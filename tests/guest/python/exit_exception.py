"""Ends by an exception that nobody catches: status 1 and a traceback."""


def inner():
    raise ValueError("nobody catches this")


inner()
