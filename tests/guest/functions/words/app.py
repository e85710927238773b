"""Counts the words on standard input; ends with the code that they ask for."""

import sys

served = 0
text = sys.stdin.read()
served += 1
print(f"{len(text.split())} words in {len(text)} characters, request {served}")
print("to the log", file=sys.stderr)
if text.startswith("big"):
    sys.stdout.write("x" * 1_000_000)
if text.startswith("exit "):
    sys.exit(int(text.split()[1]))
if text.startswith("abort"):
    sys.stdout.flush()
    import os

    os.abort()
