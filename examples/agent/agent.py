#!/usr/bin/env python3
"""Mends a small project whose tests fail, by several attempts at once.

In each round a model proposes several diffs. For each the sandbox of the best attempt so far is
forked, the diff is applied in the copy, and the tests run there. The copy in which most tests
pass is the one that the next round begins from.

E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY say where sandboxes are; see README.md.
"""

import argparse
import concurrent.futures
import dataclasses
import pathlib
import re
import sys

import model
from e2b import CommandExitException, Sandbox, SandboxException

PROJECT = pathlib.Path(__file__).parent / "project"
WORK = "/work"
# A diff may make a program that never ends. Seconds.
TESTS_MAX = 10
# Of a node whose agent was killed. Seconds.
LIFE = 600
# What the model is shown of what the tests print.
OUTPUT_MAX = 8000

DIFF = re.compile(r"```diff\n(.*?)^```", re.DOTALL | re.MULTILINE)
PASSED = re.compile(r" \.\.\. ok$", re.MULTILINE)
RAN = re.compile(r"^Ran (\d+) tests? in", re.MULTILINE)


@dataclasses.dataclass
class Attempt:
    """A sandbox, and what its tests say."""

    name: str
    box: Sandbox
    parent: "Attempt | None" = None
    passed: int = 0
    total: int = 0
    output: str = ""
    remark: str = ""

    @property
    def is_solved(self):
        return not self.remark and 0 < self.total == self.passed

    def line(self):
        verdict = self.remark or f"{self.passed} of {self.total} tests pass"
        return f"{self.name}: {verdict} [{self.box.sandbox_id}]"


def run(box, command):
    """How a command in a sandbox has ended: its exit code, and what it printed."""
    try:
        ended = box.commands.run(command, cwd=WORK, timeout=3 * TESTS_MAX)
    except CommandExitException as error:
        ended = error
    return ended.exit_code, ended.stdout + ended.stderr


def put_tests(box):
    """Tests are the project's own, whatever a diff has made of them."""
    for test in PROJECT.glob("test_*.py"):
        box.files.write(f"{WORK}/{test.name}", test.read_text())


def run_tests(attempt):
    """Runs the tests in a sandbox, and notes what they say."""
    put_tests(attempt.box)
    code, output = run(attempt.box, f"timeout {TESTS_MAX} python3 -B -m unittest -v")
    attempt.output = output[-OUTPUT_MAX:]
    attempt.total = int((RAN.findall(output) or [0])[-1])
    attempt.passed = len(PASSED.findall(output))
    if code == 124:
        attempt.passed, attempt.remark = 0, f"the tests run longer than {TESTS_MAX} s"
    elif not attempt.total:
        attempt.remark = "the tests do not run"


def try_answer(attempt, answer):
    """Applies the diff of an answer in a copy, and runs the tests there."""
    diffs = DIFF.findall(answer)
    if not diffs:
        attempt.remark = "the answer has no diff"
        return attempt
    attempt.box.files.write("/tmp/proposal.diff", diffs[0])
    code, output = run(attempt.box, "patch --batch --forward -p1 < /tmp/proposal.diff")
    if code:
        attempt.remark, attempt.output = "the diff does not apply", output[-OUTPUT_MAX:]
        return attempt
    run_tests(attempt)
    return attempt


def prompt(best):
    """What the model is asked: the project as it is in the best sandbox, and what its tests say."""
    files = []
    for path in sorted(PROJECT.glob("*.py")):
        files.append(f"{path.name}:\n```python\n{best.box.files.read(f'{WORK}/{path.name}')}```\n")
    tests = f"The tests say:\n```\n{best.output}\n```\n"
    return "Make all tests of this project pass.\n\n" + "\n".join(files) + "\n" + tests


def begin(template):
    """A sandbox with the project, whose tests have run once."""
    box = Sandbox.create(template, timeout=LIFE, metadata={"example": "agent"})
    for path in PROJECT.glob("*.py"):
        box.files.write(f"{WORK}/{path.name}", path.read_text())
    first = Attempt("the project", box)
    run_tests(first)
    return first


def attempts_of(best, answers, round_number):
    """A copy of the best sandbox for each answer, with what the tests say in it."""
    copies = best.box.fork(count=len(answers), timeout=LIFE)
    attempts, work = [], []
    for number, (copy, answer) in enumerate(zip(copies, answers), start=1):
        name = f"attempt {round_number}.{number}"
        if isinstance(copy, Exception):
            print(f"{name}: no copy was made: {copy}", file=sys.stderr)
        else:
            attempts.append(Attempt(name, copy, parent=best))
            work.append(answer)
    if not attempts:
        raise SystemExit("No attempt was made; the messages above say why.")
    with concurrent.futures.ThreadPoolExecutor(len(attempts)) as threads:
        return list(threads.map(try_answer, attempts, work))


def tree(attempts, parent=None, depth=0):
    """Lines of the tree of attempts."""
    for attempt in attempts:
        if attempt.parent is parent:
            yield "    " * depth + attempt.line()
            yield from tree(attempts, attempt, depth + 1)


def solve(everything, options):
    """The attempt in which most tests pass; all that are made are added to the list."""
    proposer = model.configured()
    best = begin(options.template)
    everything.append(best)
    for round_number in range(1, options.rounds + 1):
        if best.is_solved:
            break
        answers = proposer.propose(prompt(best), options.attempts)
        if not answers:
            break
        attempts = attempts_of(best, answers, round_number)
        everything.extend(attempts)
        leader = max(attempts, key=lambda attempt: (not attempt.remark, attempt.passed))
        if not leader.remark and leader.passed > best.passed:
            best = leader
    return best


def leave(everything, keeps):
    """Ends all sandboxes, or pauses them: then they take no memory."""
    for attempt in everything:
        try:
            attempt.box.pause() if keeps else attempt.box.kill()
        except SandboxException as error:
            print(f"{attempt.name}: {error}", file=sys.stderr)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--template", default="agent", help="template, or function (agent)")
    parser.add_argument("--attempts", type=int, default=4, help="attempts at once, up to 16 (4)")
    parser.add_argument("--rounds", type=int, default=4, help="most rounds (4)")
    parser.add_argument("--keep", action="store_true", help="pause the sandboxes, do not end them")
    options = parser.parse_args()
    if not 1 <= options.attempts <= 16:
        parser.error("--attempts is between 1 and 16")
    return options


def printable(text: str) -> str:
    """A text from a sandbox without what a terminal would take for commands."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def main():
    options = arguments()
    everything = []
    try:
        best = solve(everything, options)
        print("\n".join(tree(everything)))
        print(f"\nThe best is {best.line()}")
        for path in sorted(PROJECT.glob("*.py")):
            if not path.name.startswith("test_"):
                print(f"\n{path.name}:\n{printable(best.box.files.read(f'{WORK}/{path.name}'))}")
    finally:
        leave(everything, options.keep)
    return 0 if best.is_solved else 1


if __name__ == "__main__":
    sys.exit(main())
