"""What the workers of examples/code-interpreter do on the machine itself: code_workers.py PLACE
LANGUAGE. Each keeps what it was told, changes variables for one piece of code, answers with errors,
and outlives an interrupt."""

import asyncio
import sys

PLACE, LANGUAGE = sys.argv[1:]
sys.path.insert(0, PLACE)

from worker import WorkerContext  # noqa: E402

# Code that keeps a number, code that prints it and a variable, code that fails, and endless code.
CODE = {
    "bash": ("n=41", 'echo "$((n + 1)) $A"', "nothing", "while :; do :; done"),
    "r": ("n <- 41", "cat(n + 1, Sys.getenv('A'))", "f <- function() stop('no')\nf()", "while (TRUE) {}"),
    "java": ("int n = 41;", 'System.out.print(n + 1 + " " + System.getProperty("A"));',
             "int f() { return 1 / 0; }\nf()", "while (true) {}"),
}
ERRORS = {
    "bash": ("ExitStatus", "127", "status 127"),
    "r": ("simpleError", "no", "f()"),
    "java": ("java.lang.ArithmeticException", "/ by zero", "f(#"),
}


async def main():
    keep, show, fail, endless = CODE[LANGUAGE]
    context = WorkerContext(LANGUAGE, "/tmp")
    await context.start()

    async def run(code, variables={}):
        return [line async for line in context.execute(code, {"A": "of the sandbox"}, variables)]

    async def printed(code, variables={}):
        lines = await run(code, variables)
        assert not [line for line in lines if line["type"] == "error"], lines
        return "".join(line["text"] for line in lines if line["type"] == "stdout").strip()

    await printed(keep)
    assert await printed(show, {"A": "grün = 2"}) == "42 grün = 2"
    assert await printed(show) == "42 of the sandbox"
    name, value, traceback = ERRORS[LANGUAGE]
    [error] = [line for line in await run(fail) if line["type"] == "error"]
    assert (error["name"], error["value"]) == (name, value) and traceback in error["traceback"], error
    running = asyncio.ensure_future(run(endless))
    await asyncio.sleep(0.5)
    await context.interrupt()
    assert [line["type"] for line in await running][-1] == "error"
    assert await printed(show) == "42 of the sandbox"
    await context.restart()
    assert [line["type"] for line in await run("exit 3" if LANGUAGE == "bash" else show)][-1] == "error"
    await context.stop()
    print(f"{LANGUAGE} runs")


asyncio.run(main())
