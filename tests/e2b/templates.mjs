// What `Template` of E2B's SDK from npm does, against a node of Thaw: E2B_API_URL and
// E2B_SANDBOX_URL say where. The SDK is as npm has it; E2B_SDK is the path of its module. Each
// function of `checks` is one check, whose name is printed when it has passed.

import assert from 'node:assert/strict'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

const require = createRequire(import.meta.url)
const { BuildError, Sandbox, Template, waitForPort } = require(process.env.E2B_SDK)

const context = mkdtempSync(join(tmpdir(), 'thaw-templates-'))

// What a program of a sandbox answers.
async function atPort(box, port, path) {
  const headers = {
    'E2b-Sandbox-Id': box.sandboxId,
    'E2b-Sandbox-Port': String(port),
    'E2b-Traffic-Access-Token': box.trafficAccessToken,
  }
  return await (await fetch(process.env.E2B_SANDBOX_URL + path, { headers })).text()
}

const checks = {
  async aTemplateIsBuiltAndItsSandboxesHaveTheStartCommandRunning() {
    writeFileSync(join(context, 'app.txt'), 'first')
    const template = Template({ fileContextPath: context })
      .fromImage('python:3.12')
      .setWorkdir('/app')
      .copy('app.txt', '/app/')
      .setEnvs({ GREETING: 'hello' })
      .runCmd('echo "$GREETING" > said.txt; echo said')
      .setStartCmd('python3 -m http.server 8000', waitForPort(8000))
    const lines = []
    const info = await Template.build(template, 'served:v1', {
      cpuCount: 1,
      memoryMB: 512,
      onBuildLogs: (line) => lines.push(line.message),
    })
    assert.deepEqual(info.tags, ['v1'])
    assert.ok(lines.includes('said'), lines.join('\n'))
    const box = await Sandbox.create('served:v1')
    assert.equal(await atPort(box, 8000, '/app.txt'), 'first')
    assert.equal(await atPort(box, 8000, '/said.txt'), 'hello\n')
    assert.equal((await box.commands.run('pwd; echo $GREETING')).stdout, '/app\nhello\n')
    await box.kill()
  },

  async namesHaveTags() {
    const { buildId } = await Template.assignTags('served:v1', 'default')
    const tags = await Template.getTags('served')
    assert.deepEqual(tags.map((tag) => [tag.tag, tag.buildId]).sort(), [['default', buildId], ['v1', buildId]])
    await Template.removeTags('served', 'v1')
    assert.deepEqual([await Template.exists('served'), await Template.exists('none')], [true, false])
    await (await Sandbox.create('served')).kill()
  },

  async failuresSayWhichCommandHasFailed() {
    const failing = Template().fromTemplate('base').runCmd('echo why >&2; exit 3')
    await assert.rejects(Template.build(failing, 'failing'), (error) => {
      assert.ok(error instanceof BuildError, error)
      assert.match(error.message, /exit code 3: why/)
      return true
    })
    await assert.rejects(Template.build(Template().fromImage('redis'), 'failing'), /\[images\]/)
  },

  async templatesAreDeleted() {
    const headers = { 'X-API-KEY': process.env.E2B_API_KEY }
    const ask = (path, method) => fetch(process.env.E2B_API_URL + path, { headers, method })
    for (const one of await (await ask('/v2/templates')).json()) {
      assert.equal((await ask(`/templates/${one.templateID}`, 'DELETE')).status, 204)
    }
    assert.equal(await Template.exists('served'), false)
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
