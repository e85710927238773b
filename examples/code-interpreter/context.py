"""A context: a process that runs pieces of code in one language, one at a time, and keeps what they
leave behind."""

import asyncio
import uuid

# Where code runs, unless its context was made with another directory.
HOME = "/home/user"


class Context:
    """What contexts of all languages have. Those of a language say how code runs in it."""

    def __init__(self, language, cwd):
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        # Held while code runs, and while the process is replaced.
        self.lock, self.restarts = asyncio.Lock(), asyncio.Lock()
        # The sandbox's variables that its process has. A copy of the sandbox has others.
        self.environment = {}

    def shown(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def restart(self):
        """Ends the process, which may have ended already, and starts a new one."""
        async with self.restarts:
            await self.stop()
            await self.start()

    async def execute(self, code, environment, variables):
        """Runs code; lines for what it prints and shows, as it comes.

        `environment` is the sandbox's, which stays; `variables` are there only meanwhile."""
        async with self.lock:
            if environment is None:
                environment = self.environment
            changes = changes_of(self.environment, environment)
            # A restart meanwhile forgets it.
            self.environment = environment
            async for line in self.lines(code, changes, changes_of({}, variables)):
                yield line


def changes_of(before, after):
    """Variables to set, as NAME=VALUE, and others to remove, as NAME."""
    gone = [name for name in before if name not in after]
    return gone + [f"{name}={value}" for name, value in after.items() if before.get(name) != value]


def died():
    return error("ContextDied", "the process that runs the code has ended; restart the context")


def error(name, value, traceback=""):
    return {"type": "error", "name": name, "value": value, "traceback": traceback}
