"""Runs what its clients send, for tests of volumes. It has a database open when it is frozen."""

import http.server
import json
import os
import sqlite3
import traceback

names = {"os": os, "sqlite3": sqlite3, "json": json}
exec(os.environ.get("AT_START", ""), names)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        code = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names["result"] = None
        try:
            exec(code, names)
            answer = {"result": names["result"]}
        except Exception as error:
            answer = {"error": type(error).__name__, "errno": getattr(error, "errno", None),
                      "text": traceback.format_exc()}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
