"""Threads: locks, queues, a server with a thread for each client."""

import http.client
import http.server
import queue
import sys
import threading
import time


def counting():
    lock, total = threading.Lock(), [0]

    def add():
        for _ in range(20_000):
            with lock:
                total[0] += 1

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("counted", total[0])


def handing_over():
    work, done = queue.Queue(maxsize=4), queue.Queue()

    def worker():
        while (item := work.get()) is not None:
            done.put(item * item)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for item in range(200):
        work.put(item)
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join()
    print("squares", sum(done.get() for _ in range(200)))


def waiting():
    condition, turns = threading.Condition(), []

    def player(name, other_first):
        for _ in range(50):
            with condition:
                condition.wait_for(lambda: len(turns) % 2 == other_first)
                turns.append(name)
                condition.notify_all()

    threads = [threading.Thread(target=player, args=("ping", 0)), threading.Thread(target=player, args=("pong", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("turns", len(turns), turns == ["ping", "pong"] * 50)
    event, barrier = threading.Event(), threading.Barrier(3)
    print("event in time", event.wait(0.02))
    timer = threading.Timer(0.02, event.set)
    timer.start()
    print("event in time", event.wait(10))
    arrived = []
    parties = [threading.Thread(target=lambda: arrived.append(barrier.wait(10))) for _ in range(3)]
    for thread in parties:
        thread.start()
    for thread in parties:
        thread.join()
    print("barrier", sorted(arrived))


def locals_and_errors():
    local = threading.local()
    local.value = "main"
    seen = []
    threading.excepthook = lambda args: seen.append(args.exc_type.__name__)

    def other():
        seen.append(hasattr(local, "value"))
        raise KeyError("in a thread")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    print("locals", seen, local.value)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(0.01)
        body = f"{self.path} in a thread: {threading.current_thread() is not threading.main_thread()}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def serving():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    answers = []

    def client(number):
        connection = http.client.HTTPConnection(*server.server_address, timeout=20)
        for part in range(3):
            connection.request("GET", f"/{number}/{part}")
            answers.append(connection.getresponse().read().decode())
        connection.close()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    server.shutdown()
    server.server_close()
    print("\n".join(sorted(answers)))


sys.setswitchinterval(1e-4)
for part in (counting, handing_over, waiting, locals_and_errors, serving):
    part()
