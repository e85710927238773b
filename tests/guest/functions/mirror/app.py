"""Says all that a program can see of how its interpreter was started.

Built from a runtime template, it must say the same as when it was started.
"""

import gc
import json
import os
import posix
import random
import re
import signal
import subprocess
import sys
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer


def frames():
    """The functions that the main module was called by."""
    names, frame = [], sys._getframe()
    while frame is not None:
        names.append([frame.f_code.co_filename, frame.f_code.co_name])
        frame = frame.f_back
    return names


def failure():
    """What is printed of an error."""
    try:
        raise ValueError("as an example")
    except ValueError:
        return traceback.format_exc()


def words(path):
    with open(path, "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")]


MAIN = {name: repr(value) for name, value in globals().items() if name.startswith("__")}
MAIN.pop("__builtins__")
# Addresses are others in each image.
MAIN = {name: re.sub(" at 0x[0-9a-f]+", "", text) for name, text in MAIN.items()}
LOADED = set(sys.modules)
# A child gets the environment that the C library has.
CHILD = "import os, sys; print(sorted(os.environ.items()), sys.path, sys.argv)"

SEEN = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": repr(sys.flags),
    "executable": sys.executable,
    "prefix": sys.prefix,
    "environment": dict(os.environ),
    "posix": sorted(map(os.fsdecode, posix.environ)),
    "child": subprocess.check_output([sys.executable, "-c", CHILD], text=True),
    "cwd": os.getcwd(),
    "main": MAIN,
    "frames": frames(),
    "failure": failure(),
    "is_main": sys.modules["__main__"].__dict__ is globals(),
    "runpy": "runpy" in sys.modules,
    "customized": [getattr(sys.modules.get(name), "__file__", None)
                   for name in ("sitecustomize", "usercustomize")],
    "cmdline": words("/proc/self/cmdline"),
    "environ": sorted(words("/proc/self/environ")),
    "comm": words("/proc/self/comm"),
    "host": os.uname().nodename,
    "hosts": words("/etc/hosts"),
    "ids": [os.getuid(), os.getgid(), os.getpid()],
    "root": sorted(os.listdir("/")),
    "links": [os.stat(path).st_nlink for path in ("/", "/app", "/usr", "/etc")],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "thaws": words("/dev/thaw"),
    "interrupt": repr(signal.getsignal(signal.SIGINT)),
    "encoding": [sys.stdout.encoding, sys.getfilesystemencoding()],
    "buffering": [sys.stdout.line_buffering, sys.stdout.isatty(), sys.stdin.read()],
    "hooks": [sys.excepthook is sys.__excepthook__, len(sys.meta_path), len(sys.path_hooks)],
    "collector": [gc.isenabled(), gc.get_threshold()],
}
DRAWN = random.getrandbits(128)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        answers = {
            "/": SEEN,
            "/loaded": sorted(LOADED),
            "/drawn": DRAWN,
            "/import": self.imported,
            "/thaws": words("/dev/thaw"),
        }
        answer = answers[self.path]
        body = json.dumps(answer() if callable(answer) else answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def imported(self):
        """A module among the function's own files, which no template has seen."""
        import neighbour

        return neighbour.NAME


if __name__ == "__main__":
    if "--refuse-template" in sys.argv and "asyncio" in sys.modules:
        sys.exit("somebody has loaded asyncio")
    HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
