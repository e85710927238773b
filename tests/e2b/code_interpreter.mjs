// What E2B's code interpreter SDK from npm does, against a node that serves examples/code-interpreter
// as the template `code-interpreter-v1`. CODE_INTERPRETER is the path of its module, which is as npm
// has it.

import assert from 'node:assert/strict'
import { createRequire } from 'node:module'

const { Sandbox } = createRequire(import.meta.url)(process.env.CODE_INTERPRETER)

const box = await Sandbox.create()
assert.equal((await box.runCode('x = 41; x + 1')).text, '42')
const lines = []
const printed = await box.runCode(
  "import sys\nfor n in range(3): print(n, flush=True)\nprint('e', file=sys.stderr)",
  { onStdout: (message) => lines.push(message.line) },
)
assert.equal(lines.join(''), '0\n1\n2\n')
assert.equal(printed.logs.stderr.join(''), 'e\n')

const plot = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.title('t')\nplt.show()"
const [figure] = (await box.runCode(plot)).results
assert.ok(figure.png.startsWith('iVBORw0KGgo'))
assert.equal(figure.chart.type, 'bar')
assert.equal(figure.chart.title, 't')
assert.deepEqual(figure.chart.elements.map((bar) => [bar.label, bar.value]), [['a', 1], ['b', 2]])
const [table] = (await box.runCode("import pandas\npandas.DataFrame({'a': [1, 2]})")).results
assert.match(table.html, /<table/)
assert.deepEqual(table.data, { a: [1, 2] })

const { error } = await box.runCode('def f(): return 1 / 0\nf()')
assert.equal(error.name, 'ZeroDivisionError')
// It comes in colours.
assert.match(error.traceback.replaceAll(/\x1b\[[0-9;]*m/g, ''), /return 1 \/ 0/)
assert.equal((await box.runCode("import os; os.environ['A']", { envs: { A: 'b' } })).text, 'b')

const context = await box.createCodeContext({ cwd: '/tmp' })
assert.equal((await box.runCode('import os; os.getcwd()', { context })).text, '/tmp')
assert.equal((await box.runCode("'x' in globals()", { context })).text, 'False')
assert.ok((await box.listCodeContexts()).some((each) => each.id === context.id))
await box.runCode('y = 1', { context })
await box.restartCodeContext(context)
assert.equal((await box.runCode('y', { context })).error.name, 'NameError')
// A kernel that has started anew shows charts, too.
const again = await box.runCode(plot, { context })
assert.equal(again.results[0].chart.type, 'bar')
await box.removeCodeContext(context)

await box.runCode('const n: number = 41', { language: 'ts' })
assert.equal((await box.runCode('n + 1', { language: 'typescript' })).text, '42')
const thrown = (await box.runCode('function bad() {\n  null.x\n}\nbad()', { language: 'js' })).error
assert.equal(thrown.name, 'TypeError')
assert.match(thrown.traceback, /bad .*:2:8/)
const shell = await box.runCode('echo $A; false', { language: 'bash', envs: { A: 'b' } })
assert.deepEqual(shell.logs.stdout, ['b\n'])
assert.equal(shell.error.value, '1')
await assert.rejects(box.runCode('x', { language: 'r' }), /the program Rscript/)
assert.ok(await box.kill())
console.log('code runs')
