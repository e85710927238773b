"""Measures what E2B's Python SDK takes for a sandbox: measure.py TEMPLATE... -n N

For each template: from `Sandbox.create` to the output of the first command, and of the next one; and the same
requests by a client that does little, over connections of its own that stay, so that the difference is
what the SDK adds. Both by turns. Milliseconds.
"""

import argparse
import base64
import http.client
import json
import os
import struct
import time
from urllib.parse import urlsplit

from e2b import Sandbox

KEY = os.environ["E2B_API_KEY"]
ADDRESS = urlsplit(os.environ["E2B_API_URL"]).netloc
# Between two rounds instances get ready again.
PAUSE = 0.2
ROWS = (
    ("create", "make one"),
    ("first", "make one and have the first command's output"),
    ("next", "run `true` in one that lives"),
    ("write", "write 1 KiB"),
    ("read", "read 1 KiB"),
)


def by_sdk(template):
    began = time.perf_counter()
    box = Sandbox.create(template, timeout=60)
    created = time.perf_counter()
    assert box.commands.run("echo out").stdout == "out\n"
    first = time.perf_counter()
    box.commands.run("true")
    after = time.perf_counter()
    box.files.write("/tmp/file", "x" * 1024)
    written = time.perf_counter()
    assert len(box.files.read("/tmp/file")) == 1024
    read = time.perf_counter()
    box.kill()
    return {
        "create": created - began,
        "first": first - began,
        "next": after - first,
        "write": written - after,
        "read": read - written,
    }


class Plain:
    """Two connections that stay: to the control API, and to sandboxes."""

    def __init__(self):
        self.control, self.sandbox = (http.client.HTTPConnection(ADDRESS) for _ in range(2))

    def ask(self, connection, method, path, body, headers):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, (path, answer.status, content)
        return content

    def run(self, box, command):
        """The output of a command, by envd's `process.Process/Start`."""
        process = {"cmd": "/bin/bash", "args": ["-l", "-c", command]}
        message = json.dumps({"process": process, "stdin": False}).encode()
        headers = {**box, "Content-Type": "application/connect+json"}
        body = b"\0" + struct.pack(">I", len(message)) + message
        content = self.ask(self.sandbox, "POST", "/process.Process/Start", body, headers)
        printed, at = b"", 0
        while at < len(content):
            (length,) = struct.unpack(">I", content[at + 1 : at + 5])
            event = json.loads(content[at + 5 : at + 5 + length]).get("event", {})
            printed += base64.b64decode(event.get("data", {}).get("stdout", ""))
            assert event.get("end", {}).get("exitCode", 0) == 0, event
            at += 5 + length
        return printed

    def round(self, template):
        headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
        wanted = json.dumps({"templateID": template, "timeout": 60, "secure": True})
        began = time.perf_counter()
        made = json.loads(self.ask(self.control, "POST", "/sandboxes", wanted, headers))
        created = time.perf_counter()
        box = {
            "X-Access-Token": made["envdAccessToken"],
            "E2b-Sandbox-Id": made["sandboxID"],
            "E2b-Sandbox-Port": "49983",
        }
        assert self.run(box, "echo out") == b"out\n"
        first = time.perf_counter()
        self.run(box, "true")
        after = time.perf_counter()
        self.ask(self.control, "DELETE", "/sandboxes/" + made["sandboxID"], None, headers)
        return {"create": created - began, "first": first - began, "next": after - first}


def percentile(samples, percent):
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] * 1000


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("templates", nargs="+")
    arguments.add_argument("-n", type=int, default=50)
    arguments.add_argument("--json", action="store_true")
    arguments = arguments.parse_args()
    report, plain = {}, Plain()
    for template in arguments.templates:
        samples = {}
        for number in range(arguments.n + 3):
            for side, do in (("sdk", by_sdk), ("plain", plain.round)):
                time.sleep(PAUSE)
                # The first ones open connections, and bring files into the page cache.
                for name, seconds in do(template).items():
                    samples.setdefault((name, side), []).extend([seconds] if number >= 3 else [])
        report[template] = {
            f"{name}_{side}_ms": {f"p{p}": round(percentile(of, p), 2) for p in (50, 90, 99)}
            for (name, side), of in samples.items()
        }
    if arguments.json:
        print(json.dumps(report))
        return
    for template, figures in report.items():
        print(f"{template + ', ms':62} {'p50':>8} {'p90':>8} {'p99':>8}")
        for name, what in ROWS:
            for side in ("sdk", "plain"):
                if figure := figures.get(f"{name}_{side}_ms"):
                    values = " ".join(f"{value:8.2f}" for value in figure.values())
                    print(f"{what + ('' if side == 'sdk' else ', without the SDK'):62}"[:62] + values)


main()
