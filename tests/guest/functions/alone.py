"""A server with threads that tries to make processes: for one that may have none."""

import errno
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def name(error):
    return errno.errorcode.get(error.errno, str(error))


def attempt(make):
    try:
        make()
        return "made"
    except OSError as error:
        return name(error)


def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def count_with_threads():
    counted = []
    threads = [threading.Thread(target=lambda: counted.append(sum(range(200_000)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(counted)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        spawn = attempt(lambda: subprocess.run(["/bin/true"], check=True))
        text = f"fork {attempt(fork)}, spawn {spawn}, threads {count_with_threads()}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


ThreadingHTTPServer(("", 8080), Handler).serve_forever()
