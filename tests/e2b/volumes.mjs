// Volumes of E2B's JavaScript SDK against a node of Thaw: E2B_API_URL, E2B_SANDBOX_URL and
// E2B_VOLUME_API_URL say where, and E2B_SDK where the module is, which is as npm has it. Each
// function below is one check, whose name is printed when it has passed.

import assert from 'node:assert/strict'
import { createRequire } from 'node:module'

const { Sandbox, Volume } = createRequire(import.meta.url)(process.env.E2B_SDK)

const checks = {
  async filesAreWrittenAndReadFromOutside() {
    const volume = await Volume.create('js-files')
    assert.equal((await Volume.getInfo(volume.volumeId)).name, 'js-files')
    const made = await volume.makeDir('/a/b', { force: true })
    assert.deepEqual([made.path, made.type], ['/a/b', 'directory'])
    assert.equal((await volume.writeFile('/a/b/file', 'hello')).size, 5)
    assert.equal(await volume.readFile('/a/b/file'), 'hello')
    assert.deepEqual(Buffer.from(await volume.readFile('/a/b/file', { format: 'bytes' })).toString(), 'hello')
    assert.deepEqual((await volume.list('/', { depth: 2 })).map((one) => one.path), ['/a', '/a/b'])
    assert.equal((await volume.updateMetadata('/a/b/file', { mode: 0o600 })).mode, 0o600)
    await volume.remove('/a')
    assert.equal(await volume.exists('/a'), false)
    await assert.rejects(volume.readFile('/a/b/file'), /not found/)
    assert.ok(await Volume.destroy(volume.volumeId))
    assert.equal(await Volume.destroy(volume.volumeId), false)
  },

  async sandboxesShareAVolume() {
    const volume = await Volume.create('js-shared')
    const one = await Sandbox.create({ volumeMounts: { '/data': volume } })
    const other = await Sandbox.create({ volumeMounts: { '/mnt/data': 'js-shared' } })
    await one.commands.run('echo hello > /data/file')
    assert.equal(await other.files.read('/mnt/data/file'), 'hello\n')
    await one.kill()
    await other.kill()
    assert.equal(await volume.readFile('/file'), 'hello\n')
    assert.ok((await Volume.list()).some((found) => found.volumeId === volume.volumeId))
    assert.ok(await Volume.destroy(volume.volumeId))
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
