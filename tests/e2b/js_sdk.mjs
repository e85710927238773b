// What E2B's SDK from npm does, against a node of Thaw: E2B_API_URL and E2B_SANDBOX_URL say where.
// The SDK is as npm has it; E2B_SDK is the path of its module. Each function of `checks` is one
// check, whose name is printed when it has passed.

import assert from 'node:assert/strict'
import { createRequire } from 'node:module'

const require = createRequire(import.meta.url)
const { CommandExitError, FileNotFoundError, NotFoundError, Sandbox, SandboxError } =
  require(process.env.E2B_SDK)

const checks = {
  async livesAreControlled() {
    const box = await Sandbox.create({ timeoutMs: 600_000, metadata: { who: 'a b&c' }, envs: { A: 'b' } })
    const info = await box.getInfo()
    assert.deepEqual([info.state, info.metadata.who], ['running', 'a b&c'])
    assert.equal((await box.commands.run('echo $A')).stdout, 'b\n')
    await box.setTimeout(60_000)
    const pages = Sandbox.list({ query: { metadata: { who: 'a b&c' } } })
    assert.deepEqual((await pages.nextItems()).map((one) => one.sandboxId), [box.sandboxId])
    await box.files.write('/tmp/kept', 'kept')
    await box.pause()
    assert.equal((await Sandbox.getInfo(box.sandboxId)).state, 'paused')
    const again = await Sandbox.connect(box.sandboxId)
    assert.equal(await again.files.read('/tmp/kept'), 'kept')
    assert.equal(await again.isRunning(), true)
    assert.equal(await Sandbox.kill(box.sandboxId), true)
    assert.equal(await Sandbox.kill(box.sandboxId), false)
    assert.equal(await again.isRunning(), false)
    await assert.rejects(Sandbox.connect(box.sandboxId), NotFoundError)
  },

  async commandsRun() {
    const box = await Sandbox.create()
    const seen = []
    const done = await box.commands.run('echo out; echo err >&2', {
      onStdout: (data) => seen.push(data),
      onStderr: (data) => seen.push(data),
    })
    assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['out\n', 'err\n', 0])
    assert.deepEqual(seen.sort(), ['err\n', 'out\n'])
    await assert.rejects(box.commands.run('exit 3'), CommandExitError)
    assert.equal((await box.commands.run('pwd', { cwd: '/tmp', user: 'root' })).stdout, '/tmp\n')

    const cat = await box.commands.run('cat', { background: true, stdin: true })
    await box.commands.sendStdin(cat.pid, 'some text')
    assert.ok((await box.commands.list()).some((one) => one.pid === cat.pid))
    await box.commands.closeStdin(cat.pid)
    assert.equal((await cat.wait()).stdout, 'some text')
    const sleeper = await box.commands.run('sleep 1000', { background: true })
    assert.equal(await sleeper.kill(), true)
    await assert.rejects(sleeper.wait(), CommandExitError)
    await box.kill()
  },

  async terminalsWork() {
    const box = await Sandbox.create()
    const printed = []
    const shell = await box.pty.create({ cols: 90, rows: 20, onData: (data) => printed.push(...data) })
    await box.pty.resize(shell.pid, { cols: 120, rows: 33 })
    await box.pty.sendInput(shell.pid, new TextEncoder().encode('stty size; exit\n'))
    await shell.wait()
    assert.match(new TextDecoder().decode(new Uint8Array(printed)), /33 120/)
    await box.kill()
  },

  async filesAreChanged() {
    const box = await Sandbox.create()
    const written = await box.files.write('/tmp/a/file', 'text ü')
    assert.equal(written.path, '/tmp/a/file')
    assert.equal(await box.files.read('/tmp/a/file'), 'text ü')
    const bytes = new Uint8Array(300_000).map((_, n) => n)
    await box.files.write('/tmp/bytes', bytes.buffer)
    assert.deepEqual(await box.files.read('/tmp/bytes', { format: 'bytes' }), bytes)
    await box.files.write([{ path: '/tmp/1', data: '1' }, { path: '/tmp/2', data: '2' }])
    assert.equal(await box.files.read('/tmp/2'), '2')
    assert.equal(await box.files.makeDir('/tmp/a/b'), true)
    assert.equal(await box.files.makeDir('/tmp/a/b'), false)
    const entries = await box.files.list('/tmp/a')
    assert.deepEqual(entries.map((one) => [one.name, one.type]), [['b', 'dir'], ['file', 'file']])
    assert.equal((await box.files.rename('/tmp/a/file', '/tmp/a/moved')).path, '/tmp/a/moved')
    assert.equal((await box.files.getInfo('/tmp/a/moved')).size, 7)
    await box.files.remove('/tmp/a')
    assert.equal(await box.files.exists('/tmp/a'), false)
    await assert.rejects(box.files.read('/tmp/none'), FileNotFoundError)
    await box.kill()
  },

  async directoriesAreWatched() {
    const box = await Sandbox.create()
    const seen = []
    const watch = await box.files.watchDir('/tmp', (event) => seen.push(`${event.type} ${event.name}`))
    await box.files.write('/tmp/watched', 'x')
    for (let n = 0; n < 300 && !seen.includes('write watched'); n++) {
      await new Promise((done) => setTimeout(done, 100))
    }
    assert.ok(seen.includes('create watched') && seen.includes('write watched'), seen.join())
    await watch.stop()
    await box.kill()
  },

  async whatIsMissingSaysSo() {
    await assert.rejects(Sandbox.create({ network: { maskRequestHost: 'other.example' } }), SandboxError)
  },
}

let failed = false
for (const [name, check] of Object.entries(checks)) {
  try {
    await check()
    console.log(name)
  } catch (error) {
    failed = true
    console.error(name, error)
  }
}
process.exit(failed ? 1 : 0)
