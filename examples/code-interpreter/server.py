"""Runs code in Jupyter kernels, for `run_code` of E2B's code interpreter SDK.

HTTP on port 49999. A context is an IPython kernel, a process of its own:

    POST /execute                 {"code", "context_id", "language", "env_vars"}: a JSON object in each
                                  line of the answer, as the code runs
    GET, POST /contexts           all of them; a new one {"cwd", "language"}
    DELETE /contexts/ID           ends one
    POST /contexts/ID/restart     starts one anew

The default context is started, and its libraries are imported, before the server listens: Thaw freezes
it then, so that a copy of it runs code at once.
"""

import asyncio
import json
import os
import queue
import sys
import time
import uuid

import tornado.web
from jupyter_client.manager import AsyncKernelManager

PORT = 49999
CONTEXTS_MAX = 16
BODY_MAX = 16 << 20
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
        return {
            "type": "error",
            "name": content["ename"],
            "value": content["evalue"],
            "traceback": "\n".join(content["traceback"]),
        }
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


class Context:
    """A kernel, in which one piece of code runs at a time."""

    def __init__(self, cwd):
        self.id = str(uuid.uuid4())
        self.cwd = cwd
        self.lock = asyncio.Lock()
        # Files below /tmp, which are the guest's own: no port is taken.
        self.manager = AsyncKernelManager(transport="ipc", ip=f"/tmp/kernel-{self.id[:8]}")
        self.client = None

    async def start(self):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
                   "--matplotlib=inline"]
        self.manager.kernel_spec.argv[:] = command
        await self.manager.start_kernel(cwd=self.cwd)
        await self.connect()

    async def connect(self):
        self.client = self.manager.client()
        self.client.start_channels(hb=False, stdin=False)
        await self.client.wait_for_ready(timeout=START_PATIENCE)
        await self.run_silently(STARTUP)

    async def restart(self):
        self.client.stop_channels()
        await self.manager.restart_kernel(now=True)
        await self.connect()

    async def stop(self):
        self.client.stop_channels()
        await self.manager.shutdown_kernel(now=True)

    def shown(self):
        return {"id": self.id, "language": "python", "cwd": self.cwd}

    async def lines(self, code, silent=False):
        """Runs code; what it prints and shows, as it comes."""
        asked = self.client.execute(code, silent=silent, store_history=not silent,
                                    allow_stdin=False, stop_on_error=False)
        while True:
            try:
                message = await self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                if await self.manager.is_alive():
                    continue
                yield {"type": "error", "name": "KernelDied", "traceback": "",
                       "value": "the process that runs the code has ended; restart the context"}
                return
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            line = line_of(message)
            if line:
                yield line

    async def run_silently(self, code):
        async for line in self.lines(code, silent=True):
            if line["type"] == "error":
                raise RuntimeError(f"{line['name']}: {line['value']}")

    async def execute(self, code, variables):
        """The same with variables of the environment that are there only meanwhile."""
        async with self.lock:
            if variables:
                await self.run_silently(
                    f"import os as _os; _thaw_env = dict(_os.environ); _os.environ.update({variables!r})")
            try:
                async for line in self.lines(code):
                    yield line
            finally:
                if variables and await self.manager.is_alive():
                    await self.run_silently(
                        "_os.environ.clear(); _os.environ.update(_thaw_env); del _os, _thaw_env")


class Handler(tornado.web.RequestHandler):
    @property
    def contexts(self):
        return self.application.contexts

    def write_error(self, status, **_):
        self.finish({"code": status, "message": self._reason})

    def refuse(self, status, message):
        self.set_status(status)
        self.finish({"code": status, "message": message})

    def asked(self):
        try:
            asked = json.loads(self.request.body or b"{}")
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            raise tornado.web.HTTPError(400, reason="the body is no JSON object")
        language = asked.get("language") or "python"
        if language not in ("python", "python3", "py"):
            raise tornado.web.HTTPError(400, reason="only Python is here; leave `language` out")
        return asked

    def find(self, name):
        context = self.contexts.get(name)
        if context is None:
            raise tornado.web.HTTPError(404, reason="there is no such context; list them")
        return context


class Health(Handler):
    def get(self):
        self.finish({})


class Execute(Handler):
    running = None

    async def post(self):
        asked = self.asked()
        name, code = asked.get("context_id") or "default", asked.get("code")
        variables = asked.get("env_vars") or {}
        if not isinstance(code, str) or not isinstance(variables, dict):
            raise tornado.web.HTTPError(400, reason="`code` is a text, `env_vars` an object")
        variables = {str(name): str(value) for name, value in variables.items()}
        context = self.find(name)
        self.set_header("Content-Type", "application/x-ndjson")
        lines = context.execute(code, variables)
        try:
            async for line in lines:
                self.running = context
                self.write(json.dumps(line) + "\n")
                await self.flush()
        except tornado.iostream.StreamClosedError:
            pass
        finally:
            await self.end(context, lines)

    async def end(self, context, lines):
        gone, self.running = self.running is None, None
        if gone:
            # What still runs ends, so that the context is free for the next one.
            async for _ in lines:
                pass
        await lines.aclose()

    def on_connection_close(self):
        context, self.running = self.running, None
        if context is not None:
            asyncio.ensure_future(context.manager.interrupt_kernel())


class Contexts(Handler):
    def get(self):
        named = (one for name, one in self.contexts.items() if name != "default")
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps([one.shown() for one in named]))

    async def post(self):
        asked = self.asked()
        if len(self.contexts) > CONTEXTS_MAX:
            return self.refuse(429, f"there are {CONTEXTS_MAX} contexts already; remove one")
        cwd = asked.get("cwd") or os.getcwd()
        if not isinstance(cwd, str) or not os.path.isdir(cwd):
            raise tornado.web.HTTPError(400, reason="`cwd` is no directory")
        context = Context(cwd)
        # It has its place before it is ready: others who ask meanwhile are counted with it.
        self.contexts[context.id] = context
        try:
            await context.start()
        except BaseException:
            self.contexts.pop(context.id, None)
            raise
        self.finish(context.shown())


class OneContext(Handler):
    async def delete(self, name):
        context = self.find(name)
        for other in [key for key, one in self.contexts.items() if one is context]:
            del self.contexts[other]
        await context.stop()
        self.set_status(204)
        self.finish()


class Restart(Handler):
    async def post(self, name):
        await self.find(name).restart()
        self.finish({})


async def main():
    application = tornado.web.Application([
        ("/health", Health),
        ("/execute", Execute),
        ("/contexts", Contexts),
        ("/contexts/([^/]+)", OneContext),
        ("/contexts/([^/]+)/restart", Restart),
    ])
    default = Context(os.getcwd())
    application.contexts = {"default": default, default.id: default}
    await default.start()
    await default.run_silently(WARM_UP)
    application.listen(int(os.environ.get("PORT", PORT)), max_body_size=BODY_MAX)
    await asyncio.Event().wait()


asyncio.run(main())
