"""A context: a process that runs pieces of code in one language, one at a time, and keeps what they
leave behind."""

import asyncio
import os
import signal
import uuid

# Where code runs, unless its context was made with another directory.
HOME = "/home/user"
# Interrupts before a process is killed, and seconds between them.
INTERRUPTS, PAUSE = 12, 0.25


class Context:
    """What contexts of all languages have. Those of a language say how code runs in it:

    launch()                    starts a process, and sets `process` when it is ready
    end()                       ends it, which may have ended already
    lines(process, …)           runs code in it; lines for what it prints and shows
    is_alive(process), signal(process, number)"""

    def __init__(self, language, cwd):
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        # Held while code runs; and while the process is replaced, for which no code is waited for.
        self.lock, self.restarts = asyncio.Lock(), asyncio.Lock()
        # None before it is ready, and if it could not be started anew.
        self.process = None
        # The sandbox's variables that the process has. A copy of the sandbox has others.
        self.environment = {}
        # It is not started anew.
        self.is_stopped = False
        # How often code has ended, by which one knows whether the same still runs.
        self.ended = 0

    def shown(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self):
        async with self.restarts:
            await self.launch()

    async def restart(self):
        """Ends the process, which may have ended already, and starts a new one."""
        async with self.restarts:
            if self.is_stopped:
                return
            await self.end()
            self.process, self.environment = None, {}
            await self.launch()

    async def stop(self):
        self.is_stopped = True
        async with self.restarts:
            await self.end()

    async def execute(self, code, environment, variables):
        """Runs code; lines for what it prints and shows, as it comes.

        `environment` is the sandbox's, which stays; `variables` are there only meanwhile."""
        async with self.lock:
            async with self.restarts:
                process = self.process
                if environment is None:
                    environment = self.environment
                changes = changes_of(self.environment, environment)
            async for line in self.lines(process, code, changes, changes_of({}, variables)):
                yield line
            # A process that was started meanwhile has none of it.
            if self.process is process:
                self.environment = environment

    async def interrupt(self):
        """Ends the code that runs, if nothing else helps with its process."""
        process, ended = self.process, self.ended
        for _ in range(INTERRUPTS):
            if process is None or self.ended != ended or not await self.is_alive(process):
                return
            await self.signal(process, signal.SIGINT)
            await asyncio.sleep(PAUSE)
        if self.ended == ended:
            await self.signal(process, signal.SIGKILL)


def changes_of(before, after):
    """Variables to set, as NAME=VALUE, and others to remove, as NAME. One that is not there any more
    is again what it is without a sandbox."""
    gone = {name: os.environ.get(name) for name in before if name not in after}
    changes = {name: value for name, value in after.items() if before.get(name) != value}
    return [name if value is None else f"{name}={value}" for name, value in {**gone, **changes}.items()]


def died():
    return error("ContextDied", "the process that runs the code has ended; restart the context")


def error(name, value, traceback=""):
    return {"type": "error", "name": name, "value": value, "traceback": traceback}
