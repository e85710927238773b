"""What E2B's code interpreter SDK does, against a node that serves examples/code-interpreter as the
template `code-interpreter-v1`."""

import io
import zipfile

from e2b import SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox

box = Sandbox.create(envs={"OF_SANDBOX": "box", "BOTH": "box"})
assert box.run_code("x = 41; x + 1").text == "42"
lines = []
done = box.run_code("import sys\nfor n in range(3): print(n, flush=True)\nprint('e', file=sys.stderr)",
                    on_stdout=lambda message: lines.append(message.line))
assert "".join(lines) == "0\n1\n2\n" and "".join(done.logs.stderr) == "e\n", done

[figure] = box.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()").results
assert figure.png.startswith("iVBORw0KGgo"), figure
assert figure.chart.type.value == "line" and figure.chart.elements[0].points == [(0, 1), (1, 2)], figure.chart
table = box.run_code("import pandas\npandas.DataFrame({'a': [1]})").results[0]
assert "<table" in table.html and table.is_main_result and table.data == {"a": [1]}, table
odd = box.run_code("pandas.DataFrame({'a': [object()], 'b': [pandas.Timestamp(0)]})").results[0]
assert "<table" in odd.html and odd.data is None, odd
times = box.run_code("pandas.DataFrame({'b': [pandas.Timestamp(0)]})").results[0]
assert times.data == {"b": ["1970-01-01T00:00:00"]}, times.data
error = box.run_code("1 / 0").error
assert error.name == "ZeroDivisionError" and "ZeroDivisionError" in error.traceback, error
assert box.run_code("import os; os.environ['A']", envs={"A": "b"}).text == "b"
assert box.run_code("os.environ.get('A')").text is None

context = box.create_code_context(cwd="/tmp")
assert box.run_code("import os; os.getcwd()", context=context).text == "/tmp"
assert box.run_code("'x' in globals()", context=context).text == "False"
assert context.id in [each.id for each in box.list_code_contexts()]
box.run_code("y = 1", context=context)
box.restart_code_context(context)
assert box.run_code("y", context=context).error.name == "NameError"
box.remove_code_context(context)

try:
    box.run_code("import time; time.sleep(600)", timeout=1)
    raise AssertionError("it has no end")
except TimeoutException:
    pass
# What was cut off has ended, and the context lives.
assert box.run_code("x").text == "41"

# Every language keeps what it was told, has the variables of the sandbox and of the call, begins in
# the same directory, and says what is wrong.
STATES = {
    "javascript": ("const n = 41\nfunction f() { return n }", "f() + 1"),
    "typescript": ("const n: number = 41; enum E { A = 1 }", "(n + E.A) as number"),
    "bash": ("n=41; f() { echo $((n + 1)); }", "f"),
}
VARIABLES = {
    "python": "import os; print(*map(os.environ.get, ['OF_SANDBOX', 'BOTH', 'OF_CALL']))",
    "javascript": "const { OF_SANDBOX, BOTH, OF_CALL } = process.env; console.log(OF_SANDBOX, BOTH, OF_CALL)",
    "typescript": "console.log(...['OF_SANDBOX', 'BOTH', 'OF_CALL'].map((name: string) => process.env[name]))",
    "bash": "echo $OF_SANDBOX $BOTH $OF_CALL",
}
ERRORS = {
    "javascript": ("function bad() {\n  null.x\n}\nbad()", "TypeError", ":2:8)"),
    "typescript": ("const x: string =\nawait nothing", "ReferenceError", ":2:"),
    "bash": ("nothing", "ExitStatus", "status 127"),
}


def printed(code, **options):
    execution = box.run_code(code, **options)
    assert execution.error is None, execution.error
    return "".join(execution.logs.stdout).strip() or execution.text


for language, code in VARIABLES.items():
    assert printed(code, language=language, envs={"BOTH": "call", "OF_CALL": "call"}) == "box call call"
    assert printed(code, language=language).split()[:2] == ["box", "box"]
for language, (before, after) in STATES.items():
    assert box.run_code(before, language=language).error is None
    assert printed(after, language=language) == "42"
    context = box.create_code_context(language=language, cwd="/tmp")
    assert box.run_code(after, context=context).error, "another context knows it"
    assert printed("pwd" if language == "bash" else "process.cwd()", context=context) == "/tmp"
    code, name, place = ERRORS[language]
    error = box.run_code(code, context=context).error
    assert error.name == name and place in error.traceback, error
    assert box.list_code_contexts()[-1].language == language
    box.remove_code_context(context)
assert printed("import os; os.getcwd()") == printed("process.cwd()", language="js") == "/home/user"
assert printed("!pwd") == printed("pwd", language="bash") == box.commands.run("pwd").stdout.strip() == "/home/user"
both = box.run_code("import { join } from 'path'; console.log(join('a', 'b')); console.error('e'); await 7", language="js")
assert both.logs.stdout == ["a/b\n"] and both.logs.stderr == ["e\n"] and both.text == "7", both
assert len(printed("printf 'x%.0s' {1..300000}", language="bash")) == 300000
printed("cd /tmp; export KEPT=1", language="bash")
assert printed("echo $PWD $KEPT", language="bash") == "/tmp 1"

# Code that is cut off ends, in every language, and its context lives; a process that ends takes only
# its own context with it, until that is started anew.
defaults = {context.language: context for context in box.list_code_contexts()}
KILL = {"python": "os.kill(os.getpid(), 9)", "javascript": "process.exit(1)", "typescript": "process.exit(1)", "bash": "exit"}
ENDLESS = {"javascript": "while (true) {}", "typescript": "await new Promise(() => setTimeout(() => {}, 1e9))", "bash": "sleep 600; echo no"}
for language, code in ENDLESS.items():
    try:
        box.run_code(code, language=language, timeout=1)
        raise AssertionError("it has no end")
    except TimeoutException:
        pass
    assert printed(STATES[language][1], language=language) == "42"
kept = box.create_code_context(language="python")
for language, code in {**KILL, "python": "import os; " + KILL["python"]}.items():
    context = kept if language == "python" else defaults[language]
    assert box.run_code(code, context=context).error.name == "ContextDied"
    assert box.run_code("1", context=context).error.name == "ContextDied"
    box.restart_code_context(context)
    assert printed("echo 1" if language == "bash" else "1", context=context) == "1"
    assert printed(VARIABLES[language], context=context).split()[:2] == ["box", "box"]
for language in ["r", "java", "cobol"]:
    try:
        box.run_code("1", language=language)
        raise AssertionError(f"{language} runs")
    except SandboxException as error:
        wanted = {"r": "the program Rscript", "java": "the program java"}.get(language, "the languages here are")
        assert wanted in str(error), error

# Images that are saved are results, and so is a box plot.
[image] = box.run_code("from PIL import Image\nImage.new('RGB', (2, 2)).save('/tmp/i.png')").results
assert image.png.startswith("iVBORw0KGgo"), image
[boxes] = box.run_code("import matplotlib.pyplot as plt\nplt.boxplot([[1, 2, 3, 4], [2, 3, 4, 7]], patch_artist=True)\nplt.show()").results
assert boxes.chart.type.value == "box_and_whisker" and len(boxes.chart.elements) == 2, boxes.chart

box.pause()
box = Sandbox.connect(box.sandbox_id)
assert box.run_code("x").text == "41"
[copy] = box.fork()
copy.run_code("x = 0")
assert box.run_code("x").text == "41" and copy.run_code("x").text == "0"
# A copy has its own id, in every language, and what its original had.
for each in (box, copy):
    wanted = f"{each.sandbox_id} 1"
    assert each.run_code("`${process.env.E2B_SANDBOX_ID} 1`", language="js").text == wanted
    assert "".join(each.run_code("echo $E2B_SANDBOX_ID 1", language="bash").logs.stdout).strip() == wanted
assert copy.kill()

# Sandboxes begin as copies, and draw numbers of their own all the same.
DRAW = {
    "python": "import random, numpy; print(random.random(), numpy.random.rand())",
    "javascript": "console.log(Math.random())",
    "js": "const drawn = require('crypto'); console.log(drawn.randomUUID())",
    "typescript": "console.log(require('crypto').randomInt(2 ** 40))",
    "ts": "console.log(require('crypto').randomBytes(8).toString('hex'))",
    "bash": "echo $RANDOM $RANDOM $RANDOM",
}
other, third = Sandbox.create(), Sandbox.create()
[fourth] = other.fork()
for boxes in [(other, third), (other, fourth)]:
    for language, code in DRAW.items():
        drawn = {str(each.run_code(code, language=language).logs.stdout) for each in boxes}
        assert len(drawn) == 2, drawn
assert fourth.kill() and third.kill()
# A copy of one that has drawn goes its own way, too.
[copy] = other.fork()
for language, code in DRAW.items():
    drawn = {str(each.run_code(code, language=language).logs.stdout) for each in (other, copy)}
    assert len(drawn) == 2, drawn
assert copy.kill() and other.kill()

# Output that is longer than a pipe comes whole, with the code that prints it; code that does not heed
# interrupts ends with its context.
for language, code in {"python": "print('x' * 10 ** 6)", "js": "console.log('x'.repeat(1e6))"}.items():
    assert printed(code, language=language) == "x" * 10 ** 6
    assert printed("1", language=language) == "1"
stubborn = box.create_code_context(language="python")
try:
    box.run_code("import time\nwhile True:\n  try: time.sleep(60)\n  except KeyboardInterrupt: pass", context=stubborn, timeout=1)
    raise AssertionError("it has no end")
except TimeoutException:
    pass
assert box.run_code("1", context=stubborn).error.name == "ContextDied"
box.restart_code_context(stubborn)
assert printed("1", context=stubborn) == "1"

# What pip installs is there for the code that runs already, and for commands.
wheel = io.BytesIO()
with zipfile.ZipFile(wheel, "w") as files:
    about = {"METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
             "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "RECORD": ""}
    files.writestr("tiny.py", "size = 7\n")
    for name, content in about.items():
        files.writestr(f"tiny-1.0.dist-info/{name}", content)
box.files.write("/tmp/tiny-1.0-py3-none-any.whl", wheel.getvalue())
assert box.run_code("import tiny").error.name == "ModuleNotFoundError"
box.run_code("%pip install --no-index /tmp/tiny-1.0-py3-none-any.whl")
assert box.run_code("import tiny; tiny.size").text == "7"
assert "tiny" in box.commands.run("pip list").stdout
assert "pip" in box.commands.run("pip3 uninstall --yes tiny && pip --version").stdout
assert box.kill()
print("code runs")
