"""Runs code for `run_code` of E2B's code interpreter SDK.

HTTP on port 49999. A context is a process that runs code in one language:

    POST /execute                 {"code", "context_id" or "language", "env_vars"}: a JSON object in each
                                  line of the answer, as the code runs
    GET, POST /contexts           all of them; a new one {"cwd", "language"}
    DELETE /contexts/ID           ends one
    POST /contexts/ID/restart     starts one anew

Each language has a default context. Those of `READY_LANGUAGES` are started, and their libraries are
imported, before the server listens: Thaw freezes it then, so that a copy of it runs code at once. The
others start when they are first asked for.

The header `Thaw-Sandbox-Environment`, which the node sets for those who may know them, has the
variables of the sandbox: a JSON object in Base64. A request without it leaves them as they are.
"""

import asyncio
import base64
import collections
import json
import os
import site

import tornado.web

import worker
from context import HOME
from python_context import PythonContext
from worker import WorkerContext

PORT = 49999
# Most contexts besides the default ones.
CONTEXTS_MAX = 16
BODY_MAX = 16 << 20
HEAD_MAX = 1 << 20
# Languages whose default contexts are frozen with the server, if their programs are here. Each is a
# process more that every copy has.
READY = os.environ.get("READY_LANGUAGES", "python").split()
ALIASES = {"python3": "python", "py": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}
KINDS = {"python": PythonContext, **dict.fromkeys(worker.COMMANDS, WorkerContext)}


def refusal(status, message):
    return tornado.web.HTTPError(status, reason=message)


def language_of(asked):
    """The language that a request names; Python without one."""
    named = asked.get("language") or "python"
    language = ALIASES.get(str(named).lower().strip(), str(named).lower().strip())
    if language not in KINDS:
        raise refusal(400, f"the languages here are {', '.join(KINDS)}")
    program = None if language == "python" else worker.missing(language)
    if program:
        raise refusal(400, f"{language} wants the program {program}, which this template does not have")
    return language


def texts(variables):
    """Variables of a request, as a process can have them."""
    if not isinstance(variables, dict):
        raise refusal(400, "variables are an object")
    variables = {str(name): str(value) for name, value in variables.items()}
    if any(not name or "=" in name or "\0" in name + value for name, value in variables.items()):
        raise refusal(400, "the name of a variable has no `=`, and neither it nor its value a NUL")
    return variables


class Contexts:
    """All contexts by their ids, and the default one of each language."""

    def __init__(self):
        self.all = {}
        self.defaults = {}
        # Held while a default context is made; nobody waits for another language.
        self.locks = collections.defaultdict(asyncio.Lock)

    def find(self, name):
        context = self.defaults.get("python") if name == "default" else self.all.get(name)
        if context is None:
            raise refusal(404, "there is no such context; list them")
        return context

    async def default(self, language):
        if context := self.defaults.get(language):
            return context
        async with self.locks[language]:
            if language not in self.defaults:
                self.defaults[language] = await self.make(language, HOME)
            return self.defaults[language]

    async def make_another(self, language, cwd):
        if len(self.all) - len(self.defaults) >= CONTEXTS_MAX:
            raise refusal(429, f"there are {CONTEXTS_MAX} contexts already; remove one")
        return await self.make(language, cwd)

    async def make(self, language, cwd):
        context = KINDS[language](language, cwd)
        # It has its place before it is ready: others who ask meanwhile are counted with it.
        self.all[context.id] = context
        try:
            await context.start()
            if context.id not in self.all:
                raise refusal(404, "the context was removed before it was ready")
        except FileNotFoundError as missing:
            self.all.pop(context.id, None)
            raise refusal(400, f"there is no {missing.filename}") from missing
        except BaseException:
            self.all.pop(context.id, None)
            await context.stop()
            raise
        return context

    async def remove(self, context):
        del self.all[context.id]
        for language in [language for language, one in self.defaults.items() if one is context]:
            del self.defaults[language]
        await context.stop()


class Handler(tornado.web.RequestHandler):
    @property
    def contexts(self):
        return self.application.contexts

    def write_error(self, status, **_):
        self.finish({"code": status, "message": self._reason})

    def asked(self):
        try:
            asked = json.loads(self.request.body or b"{}")
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            raise refusal(400, "the body is no JSON object")
        return asked

    def environment(self):
        """The sandbox's variables; none if the request did not come by way of E2B's API."""
        shown = self.request.headers.get("Thaw-Sandbox-Environment")
        return texts(json.loads(base64.b64decode(shown))) if shown else None


class Health(Handler):
    def get(self):
        self.finish({})


class Execute(Handler):
    # The context in which the code of this request runs.
    running = None
    is_gone = is_interrupted = False

    async def post(self):
        asked = self.asked()
        code, variables = asked.get("code"), texts(asked.get("env_vars") or {})
        if not isinstance(code, str) or "\0" in code:
            raise refusal(400, "`code` is a text without a NUL")
        context = await self.context_of(asked)
        self.set_header("Content-Type", "application/x-ndjson")
        async for line in context.execute(code, self.environment(), variables):
            self.running = context
            await self.show(line)
        self.running = None

    async def show(self, line):
        if self.is_gone:
            return self.interrupt()
        self.write(json.dumps(line) + "\n")
        try:
            await self.flush()
        except tornado.iostream.StreamClosedError:
            pass

    def on_connection_close(self):
        self.is_gone = True
        self.interrupt()

    def interrupt(self):
        """Ends what runs for a client that has gone, so that the context is free for the next one."""
        if self.running is not None and not self.is_interrupted:
            self.is_interrupted = True
            asyncio.ensure_future(self.running.interrupt())

    async def context_of(self, asked):
        name = asked.get("context_id")
        if not name:
            return await self.contexts.default(language_of(asked))
        if asked.get("language"):
            raise refusal(400, "a context has its language; say one of `context_id` and `language`")
        return self.contexts.find(name)


class ManyContexts(Handler):
    def get(self):
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps([one.shown() for one in self.contexts.all.values()]))

    async def post(self):
        asked = self.asked()
        language, cwd = language_of(asked), asked.get("cwd") or HOME
        if not isinstance(cwd, str) or not os.path.isdir(cwd):
            raise refusal(400, "`cwd` is no directory")
        context = await self.contexts.make_another(language, cwd)
        self.finish(context.shown())


class OneContext(Handler):
    async def delete(self, name):
        await self.contexts.remove(self.contexts.find(name))
        self.set_status(204)
        self.finish()


class Restart(Handler):
    async def post(self, name):
        await self.contexts.find(name).restart()
        self.finish({})


async def main():
    # Directories that programs of E2B's users expect, and those where pip installs: Python looks only at
    # those that are there when it starts.
    for directory in (HOME, "/root", site.getsitepackages()[0], site.getusersitepackages()):
        os.makedirs(directory, exist_ok=True)
    application = tornado.web.Application([
        ("/health", Health),
        ("/execute", Execute),
        ("/contexts", ManyContexts),
        ("/contexts/([^/]+)", OneContext),
        ("/contexts/([^/]+)/restart", Restart),
    ])
    application.contexts = Contexts()
    for language in READY:
        if language == "python" or not worker.missing(language):
            await (await application.contexts.default(language)).warm_up()
    application.listen(int(os.environ.get("PORT", PORT)), max_body_size=BODY_MAX,
                       max_header_size=HEAD_MAX)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
