"""Serves a workload over HTTP: `/?n=1000` calls `workload.run(n=1000)`.

The answer is `{"result": ..., "milliseconds": ...}`. Every workload's directory
has a copy of this file beside its `workload.py`, since a function has files of its own
directory only.
"""

import inspect
import json
import os
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qsl, urlsplit

import workload

PARAMETERS = inspect.signature(workload.run).parameters


class Handler(BaseHTTPRequestHandler):
    """Answers every GET with one run."""

    def do_GET(self):
        query = dict(parse_qsl(urlsplit(self.path).query))
        try:
            arguments = {name: int(value) for name, value in query.items()}
            begin = time.perf_counter()
            result = workload.run(**arguments)
        except (TypeError, ValueError) as error:
            takes = ", ".join(map(str, PARAMETERS.values()))
            self.reply(400, {"error": str(error), "takes": takes})
            return
        milliseconds = (time.perf_counter() - begin) * 1000
        self.reply(200, {"result": result, "milliseconds": round(milliseconds, 3)})

    def reply(self, status, value):
        body = (json.dumps(value) + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    HTTPServer(("0.0.0.0", int(os.environ.get("PORT", "8080"))), Handler).serve_forever()
