"""What E2B's code interpreter SDK does, against a node that serves examples/code-interpreter as the
template `code-interpreter-v1`."""

from e2b import TimeoutException
from e2b_code_interpreter import Sandbox

box = Sandbox.create()
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

box.pause()
box = Sandbox.connect(box.sandbox_id)
assert box.run_code("x").text == "41"
[copy] = box.fork()
copy.run_code("x = 0")
assert box.run_code("x").text == "41" and copy.run_code("x").text == "0"
assert copy.kill() and box.kill()
print("code runs")
