"""Python: a context is an IPython kernel."""

import asyncio
import os
import queue
import signal
import sys
import time
import uuid

import zmq
from jupyter_client.manager import AsyncKernelManager

from context import Context, died, error

# Seconds that a kernel may take to start.
START_PATIENCE = 60
# Executed in the default context before the first request: imports, and the font cache.
WARM_UP = """
import e2b_charts, matplotlib, numpy, pandas
import matplotlib.pyplot as plt
plt.plot([1, 2]); plt.title("x"); plt.savefig("/dev/null", format="png"); plt.close("all")
del plt
"""
# Executed in each kernel when it has started. Its names are none of the user's.
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup.py")) as source:
    STARTUP = f"exec(compile({source.read()!r}, 'startup.py', 'exec'), {{}})"
# The module that this has put there.
VARIABLES = "__import__('sys').modules['thaw_variables']"

# The names of MIME types in a result; others go into `extra`.
NAMES = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/chart": "chart",
    "e2b/data": "data",
}


def result_of(message):
    """A line for what a cell shows, or what its last expression is."""
    content = message["content"]
    result = {"type": "result", "is_main_result": message["msg_type"] == "execute_result"}
    extra = {}
    for kind, value in content["data"].items():
        if kind in NAMES:
            result[NAMES[kind]] = value
        else:
            extra[kind] = value
    text = result.get("text", "")
    # A text is shown as it is, and not as Python would write it.
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        result["text"] = text[1:-1]
    if extra:
        result["extra"] = extra
    return result


def line_of(message):
    """What a message of a kernel is for the client; none for those that say nothing to it."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        return {"type": content["name"], "text": content["text"], "timestamp": time.time_ns()}
    if kind in ("display_data", "execute_result"):
        return result_of(message)
    if kind == "error":
        return error(content["ename"], content["evalue"], "\n".join(content["traceback"]))
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


class Kernel:
    """A kernel with a connection to it."""

    def __init__(self):
        # Files below /tmp, which are the guest's own: no port is taken.
        self.manager = AsyncKernelManager(transport="ipc", ip=f"/tmp/kernel-{uuid.uuid4().hex[:8]}")
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
                   "--matplotlib=inline"]
        self.manager.kernel_spec.argv[:] = command
        self.client, self.is_open = None, True

    async def start(self, cwd):
        await self.manager.start_kernel(cwd=cwd)
        self.client = self.manager.client()
        self.client.start_channels(hb=False, stdin=False)
        await self.client.wait_for_ready(timeout=START_PATIENCE)
        if not await self.run_silently(STARTUP):
            raise RuntimeError("the kernel has ended as it started")

    async def end(self):
        """What runs knows by `is_open` that it runs no more."""
        if self.is_open:
            self.is_open = False
            if self.client is not None:
                self.client.stop_channels()
            await self.manager.shutdown_kernel(now=True)

    async def is_alive(self):
        return self.is_open and await self.manager.is_alive()

    async def messages(self, code, silent=False):
        if not self.is_open:
            yield died()
            return
        asked = self.client.execute(code, silent=silent, store_history=not silent, allow_stdin=False,
                                    stop_on_error=False)
        while True:
            message = await self.message()
            if message is None:
                yield died()
                return
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            line = line_of(message)
            if line:
                yield line

    async def message(self):
        """The next message, or None at the end of the kernel."""
        while True:
            try:
                return await self.client.get_iopub_msg(timeout=1)
            except (queue.Empty, zmq.ZMQError):
                if not await self.is_alive():
                    return None
            except (asyncio.CancelledError, AssertionError):
                # So it is when the client's channels are closed, too.
                if self.is_open:
                    raise
                return None

    async def run_silently(self, code):
        """Runs code of this server; whether the kernel is there still."""
        async for line in self.messages(code, silent=True):
            if line["type"] == "error" and await self.is_alive():
                raise RuntimeError(f"{line['name']}: {line['value']}")
        return await self.is_alive()


class PythonContext(Context):
    async def launch(self):
        kernel = Kernel()
        try:
            await kernel.start(self.cwd)
        except BaseException:
            await kernel.end()
            raise
        self.process = kernel

    async def end(self):
        if self.process is not None:
            await self.process.end()

    async def warm_up(self):
        await self.process.run_silently(WARM_UP)

    async def is_alive(self, kernel):
        return await kernel.is_alive()

    async def signal(self, kernel, number):
        if number == signal.SIGINT:
            await kernel.manager.interrupt_kernel()
        elif await kernel.is_alive():
            await kernel.manager.signal_kernel(number)

    async def lines(self, kernel, code, changes, variables):
        if kernel is None or not await self.prepare(kernel, changes, variables):
            yield died()
            return
        try:
            async for line in kernel.messages(code):
                yield line
        finally:
            self.ended += 1
            if variables and await kernel.is_alive():
                await kernel.run_silently(f"{VARIABLES}.give_back()")

    async def prepare(self, kernel, changes, variables):
        """Changes the variables; whether the kernel is there."""
        if not await kernel.is_alive():
            return False
        if changes and not await kernel.run_silently(f"{VARIABLES}.stay({changes!r})"):
            return False
        return not variables or await kernel.run_silently(f"{VARIABLES}.lend({variables!r})")
