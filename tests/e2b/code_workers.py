"""What the contexts of examples/code-interpreter do on the machine itself: code_workers.py PLACE
LANGUAGE. Each keeps what it was told, changes variables for one piece of code, answers with errors,
and outlives an interrupt and code that takes away what it works with."""

import asyncio
import os
import signal
import sys
from types import SimpleNamespace

PLACE, LANGUAGE = os.path.abspath(sys.argv[1]), sys.argv[2]
sys.path[:0] = [PLACE, f"{PLACE}/build/site"]
os.environ["PYTHONPATH"] = f"{PLACE}/build/site"
os.environ["NODE_PATH"] = f"{PLACE}/build/node_modules"

SCRIPT = SimpleNamespace(
    # Keeps a number; prints it and a variable; fails.
    keep="const n = 41", show="console.log(n + 1, process.env.A)", fail="function f() { null.x }\nf()",
    error=("TypeError", "Cannot read properties of null (reading 'x')", "at f"),
    endless="while (true) {}",
    # Prints a million letters; a variable; what the next code's output may follow at once.
    much="console.log('x'.repeat(1e6))", variable="console.log(process.env.B)",
    noisy="setInterval(() => console.log('x'.repeat(1e5)), 1)",
    comment="//",
    # What a worker outlives.
    harm=["function process(x) {}; class Promise {}; const Buffer = 1, String = 2, Number = 3; var Error, console",
          "throw { get message() { throw 1 } }", "({ [Symbol.for('nodejs.util.inspect.custom')]() { throw 1 } })",
          "#!/usr/bin/env node\n1"],
    after="require('fs').writeSync(1, n + 1 + ' ' + globalThis.global.process.name)", left="42 process",
)
LANGUAGES = {
    "javascript": SCRIPT,
    "typescript": SCRIPT,
    "bash": SimpleNamespace(
        keep="n=41", show='echo "$((n + 1)) $A"', fail="nothing", error=("ExitStatus", "127", "status 127"),
        endless="f() { sleep 60; echo no; }; g() { while :; do f; f || f; done; echo no; }; g; echo no",
        much="printf 'x%.0s' {1..1000000}", variable='echo "$B"', noisy="while :; do echo x; sleep 0.01; done &",
        comment="#", harm=["set -x; printf() { :; }; read() { :; }", "set -u", "set +u"],
        after='{ set +x; unset -f printf read; } 2>/dev/null; printf $((n + 1))', left="42"),
    "r": SimpleNamespace(
        keep="n <- 41", show="cat(n + 1, Sys.getenv('A'))", fail="f <- function() stop('no')\nf()",
        error=("simpleError", "no", "f()"), endless="while (TRUE) {}", much="cat(strrep('x', 1e6))",
        variable="cat(Sys.getenv('B'))", noisy="1", comment="#",
        harm=["rm(list = ls(all.names = TRUE)); c <- vapply <- function(...) stop('no')",
              "stop(structure(class = c('odd', 'error', 'condition'), list(message = NULL, call = NULL)))",
              "stop(structure(class = c('odd', 'error', 'condition'), list(message = letters, call = NULL)))",
              "conditionMessage.odd <- function(c) stop('no'); "
              "stop(structure(class = c('odd', 'error', 'condition'), list()))"],
        after="n <- 41; cat(n + 1)", left="42"),
    "java": SimpleNamespace(
        keep="int n = 41;", show='System.out.print(n + 1 + " " + System.getProperty("A"));',
        fail="int f() { return 1 / 0; }\nf()", error=("java.lang.ArithmeticException", "/ by zero", "f(#"),
        endless="while (true) {}", much='System.out.print("x".repeat(1000000));',
        variable='System.out.print(System.getProperty("B"));', noisy="1", comment="//", harm=[],
        after="System.out.print(n + 1);", left="42"),
    "python": SimpleNamespace(
        keep="n = 41", show="import os; print(n + 1, os.environ.get('A'))", fail="def f(): 1 / 0\nf()",
        error=("ZeroDivisionError", "division by zero", "f()"),
        endless="import time\nfor _ in range(3):\n  try: time.sleep(60)\n  except KeyboardInterrupt: pass\n1 / 0",
        much="print('x' * 10 ** 6)", variable="import os; print(os.environ.get('B'))", noisy="1", comment="#",
        harm=[], after="print(n + 1)", left="42"),
}


def context_of(language):
    if language == "python":
        from python_context import PythonContext as Kind
    else:
        from worker import WorkerContext as Kind
    return Kind(language, "/tmp")


async def check_worker(run, printed, context):
    """What a worker prints and answers ends with the code."""
    if LANGUAGE == "bash":
        for half in ("c3", "bc"):
            assert await printed(rf"printf '\x{half}'") == "\ufffd"
        assert (await run("exit 3"))[-1]["name"] == "ContextDied"
        await context.restart()
    if LANGUAGE != "python":
        context.process.partial += b"odd\0"
        assert (await run("1"))[-1]["name"] == "ContextDied"
        assert (await run("1"))[-1]["name"] == "ContextDied"
        await context.restart()
        assert (await run("1"))[-1].get("name") != "ContextDied"


async def main():
    code = LANGUAGES[LANGUAGE]
    os.environ["B"] = "of the server"
    context = context_of(LANGUAGE)
    await context.start()
    environment = {"A": "of the sandbox", "B": "of the sandbox"}

    async def run(code, variables={}):
        async with asyncio.timeout(30):
            return [line async for line in context.execute(code, dict(environment), variables)]

    async def printed(code, variables={}):
        lines = await run(code, variables)
        assert not [line for line in lines if line["type"] == "error"], lines
        return "".join(line["text"] for line in lines if line["type"] == "stdout").strip()

    await printed(code.keep)
    assert await printed(code.show, {"A": "grün = 2"}) == "42 grün = 2"
    assert await printed(code.show) == "42 of the sandbox"
    name, value, traceback = code.error
    [error] = [line for line in await run(code.fail) if line["type"] == "error"]
    assert (error["name"], error["value"]) == (name, value) and traceback in error["traceback"], error

    # Output and code of any length come whole.
    assert await printed(code.much) == "x" * 10 ** 6
    assert await printed(f"{code.comment} {'ü' * 300000}\n{code.show}") == "42 of the sandbox"

    # Interrupts end code, however deep it is, and nothing else.
    running = asyncio.ensure_future(run(code.endless))
    await asyncio.sleep(0.5)
    await context.interrupt()
    ended = await running
    assert ended[-1]["type"] == "error" and ended[-1]["name"] != "ContextDied", ended
    assert not [line for line in ended if line["type"] == "stdout"], ended
    for _ in range(3):
        await context.signal(context.process, signal.SIGINT)
        await asyncio.sleep(0.05)
    # On a busy machine, one of them may come late, and end the code that has come meanwhile.
    for _ in range(3):
        lines = await run(code.show)
        if not [line for line in lines if line["type"] == "error"]:
            break
        assert lines[-1].get("name") != "ContextDied", lines
    assert await printed(code.show) == "42 of the sandbox"

    # A variable that the sandbox has no more is again that of the server.
    assert await printed(code.variable) == "of the sandbox"
    del environment["B"]
    if LANGUAGE != "java":
        assert await printed(code.variable) == "of the server"

    for harm in code.harm:
        lines = await run(harm)
        assert lines[-1].get("name") != "ContextDied" and "_thaw" not in str(lines), lines
    assert await printed(code.after) == code.left

    # A request that is longer than a pipe comes to a worker that waits for its output to be read.
    await run(code.noisy)
    await asyncio.sleep(0.2)
    assert not [line for line in await run(f"{code.comment} {'x' * 300000}") if line["type"] == "error"]

    # Code that comes while a context restarts runs in the new process, with the sandbox's variables.
    environment["B"] = "of another"
    restarting = asyncio.ensure_future(context.restart())
    await asyncio.sleep(0)
    assert await printed(code.variable) == "of another"
    await restarting
    restarting = asyncio.ensure_future(run(code.endless.replace("range(3)", "range(10 ** 6)")))
    await asyncio.sleep(0.5)
    await context.restart()
    assert (await restarting)[-1]["name"] == "ContextDied"
    assert await printed(code.variable) == "of another"

    await check_worker(run, printed, context)
    await context.stop()
    assert (await run("1"))[-1]["name"] == "ContextDied"
    print(f"{LANGUAGE} runs")


asyncio.run(main())
