"""Other languages than Python: a context is a worker, a program of that language beside this file.

A worker gets the numbers of two pipes as its last arguments. It reads requests from the first and
writes answers to the second; its standard output and error are those of the code. Requests and
answers are fields, each with a NUL at its end:

    the number of bytes that follow, N, N changes of variables that stay, N, N changes that end with
    the code, the code
    result TEXT | error NAME VALUE TRACEBACK | done

A change is NAME=VALUE, or NAME if the variable is removed. SIGINT ends the code, and not the worker.
"""

import asyncio
import codecs
import logging
import os
import shutil
import signal
import subprocess
import time

from context import HOME, Context, died, error

PLACE = os.path.dirname(os.path.abspath(__file__))
# Bytes of one read. A pipe keeps so many, too.
PIECE = 64 << 10
# Most bytes of an answer; the rest of a longer one is left out.
ANSWER_MAX = 16 << 20
# The fields of an answer, with its kind.
FIELDS = {"result": 2, "error": 4, "done": 1}
# Seconds in which a line that is written in pieces comes together.
GATHERING = 0.005
# Seconds that a worker may take to start.
START_PATIENCE = 60

JAVA = ["java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "--source", "17"]
COMMANDS = {
    "javascript": ["node", "--no-warnings", f"{PLACE}/worker.js", "javascript"],
    "typescript": ["node", "--no-warnings", f"{PLACE}/worker.js", "typescript"],
    "bash": ["bash", "--norc", "--noprofile", f"{PLACE}/worker.sh"],
    "r": ["Rscript", "--vanilla", f"{PLACE}/worker.R"],
    "java": JAVA + [f"{PLACE}/Worker.java"],
}


def missing(language):
    """The program that a language needs and that is not here."""
    program = COMMANDS[language][0]
    return None if shutil.which(program) else program


class Stream:
    """What one of a worker's pipes has; it never waits."""

    def __init__(self):
        ours, self.worker_end = os.pipe()
        os.set_blocking(ours, False)
        self.file = open(ours, "rb", buffering=0)
        self.has_ended = False

    def read(self):
        piece = self.file.read(PIECE)
        self.has_ended = piece == b""
        return piece or b""


class Process:
    """A worker with its pipes."""

    def __init__(self, language, cwd):
        self.streams = {"stdout": Stream(), "stderr": Stream()}
        self.decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self.streams}
        self.answers, self.partial, self.is_killed = Stream(), bytearray(), False
        requests, ours = os.pipe()
        os.set_blocking(ours, False)
        self.requests = open(ours, "wb", buffering=0)
        passed = requests, self.answers.worker_end
        out, err = (stream.worker_end for stream in self.streams.values())
        try:
            self.child = subprocess.Popen(
                COMMANDS[language] + [str(fd) for fd in passed], cwd=cwd, pass_fds=passed,
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        finally:
            for fd in (*passed, out, err):
                os.close(fd)

    def is_alive(self):
        return not self.is_killed and self.child.poll() is None and not self.answers.has_ended

    def signal(self, number):
        try:
            os.killpg(self.child.pid, number)
        except ProcessLookupError:
            pass

    def kill(self):
        """Nothing is read from it any more. What it has started outlives it if it has ended before."""
        self.is_killed = True
        if self.child.poll() is None:
            self.signal(signal.SIGKILL)

    async def end(self):
        self.signal(signal.SIGKILL)
        while self.child.poll() is None:
            await asyncio.sleep(0.01)

    def files(self):
        streams = (self.answers, *self.streams.values())
        return [stream.file for stream in streams if not stream.has_ended]

    async def exchange(self, fields):
        """Sends a request; lines for what the code prints and answers, until it is done."""
        if not self.is_alive():
            raise EOFError
        async for line in self.ask(fields):
            yield line
        while True:
            if self.is_alive():
                await ready(self.files(), [])
            alive = self.is_alive()
            # Answers are read first: the code has printed all before its worker says that it is done.
            answers = list(self.answered())
            if alive and not answers:
                await asyncio.sleep(GATHERING)
                answers = list(self.answered())
            is_done = ["done"] in answers
            for line in self.printed(is_done):
                yield line
            for answer in answers:
                if answer[0] != "done":
                    yield line_of(answer)
            if is_done:
                return
            if not alive:
                raise EOFError

    async def ask(self, fields):
        """Sends a request; lines for what is printed meanwhile, for which a worker may wait."""
        request = b"".join(field.encode("utf-8", "replace") + b"\0" for field in fields)
        rest = memoryview(b"%d\0%b" % (len(request), request))
        while rest and self.is_alive():
            written = self.requests.write(rest)
            if written is None:
                await ready(self.files(), [self.requests])
                for line in self.printed(False):
                    yield line
            else:
                rest = rest[written:]

    def printed(self, is_done):
        """Lines for what the code has printed, the last piece of each stream."""
        for name, stream in self.streams.items():
            # The next code does not end a character that this one has begun.
            text = self.decoders[name].decode(stream.read(), is_done)
            if text:
                yield {"type": name, "text": text, "timestamp": time.time_ns()}

    def answered(self):
        """The answers that are complete."""
        piece = self.answers.read()
        if len(self.partial) > ANSWER_MAX:
            piece = piece[piece.find(b"\0"):] if b"\0" in piece else b""
        self.partial += piece
        while b"\0" in piece:
            kind = self.partial.split(b"\0", 1)[0].decode("utf-8", "replace")
            fields = self.partial.split(b"\0", FIELDS.get(kind, 1))
            if len(fields) <= FIELDS.get(kind, 1):
                break
            self.partial = fields.pop()
            yield [field.decode("utf-8", "replace") for field in fields]


async def ready(to_read, to_write):
    """Waits until one of them is, or for a second."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def found():
        if not future.done():
            future.set_result(None)

    for fd in to_read:
        loop.add_reader(fd, found)
    for fd in to_write:
        loop.add_writer(fd, found)
    try:
        await asyncio.wait([future], timeout=1)
    finally:
        for fd in to_read:
            loop.remove_reader(fd)
        for fd in to_write:
            loop.remove_writer(fd)


class WorkerContext(Context):
    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        self.count = 0

    async def launch(self):
        if self.cwd == HOME:
            # Code may have removed it.
            os.makedirs(HOME, exist_ok=True)
        process = Process(self.language, self.cwd)
        try:
            # An interrupt before it serves would end it.
            async with asyncio.timeout(START_PATIENCE):
                async for line in process.exchange(["0", "0", ""]):
                    if line["type"] == "error":
                        raise RuntimeError(f"{self.language}: {line['value']}")
        except BaseException:
            await process.end()
            raise
        self.count, self.process = 0, process

    async def end(self):
        if self.process is not None:
            await self.process.end()

    async def warm_up(self):
        """It has run something when it has started."""

    async def is_alive(self, process):
        return process.is_alive()

    async def signal(self, process, number):
        process.signal(number)

    async def lines(self, process, code, changes, variables):
        if process is None:
            yield died()
            return
        self.count += 1
        yield {"type": "number_of_executions", "execution_count": self.count}
        request = [str(len(changes)), *changes, str(len(variables)), *variables, code]
        is_done = False
        try:
            async for line in process.exchange(request):
                yield line
            is_done = True
        except Exception as problem:
            if not isinstance(problem, (EOFError, BrokenPipeError)):
                logging.warning("a worker of %s has answered what is no answer: %r", self.language, problem)
            process.kill()
            yield died()
        finally:
            self.ended += 1
            if not is_done:
                # The answer of this code would be taken for that of the next.
                process.kill()


def line_of(answer):
    kind, *values = answer
    if kind == "result":
        return {"type": "result", "text": values[0], "is_main_result": True}
    return error(*values)
