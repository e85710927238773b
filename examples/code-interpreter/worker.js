'use strict'

// Runs pieces of JavaScript or TypeScript for worker.py, which describes requests and answers.

const crypto = require('crypto')
const fs = require('fs')
const { createRequire } = require('module')
const net = require('net')
const path = require('path')
const { inspect } = require('util')
const vm = require('vm')

const { scriptOf } = require('./script.js')

// The code may declare such names anew, and replaces those of all programs then.
const { BigUint64Array, Buffer, Error, Number, Promise, String, console, process } = globalThis
const { getRandomValues, randomInt, randomUUID } = crypto

const [language, requests, answers] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])]
const loader = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER
const erase = language === 'typescript' ? require('./typescript.js').erase : (code) => code
let count = 0
// Ends what runs with an error.
let interrupted = () => {}

function answer(...fields) {
  let rest = Buffer.from(fields.map((field) => String(field).replaceAll('\0', '') + '\0').join(''))
  while (rest.length) rest = rest.subarray(fs.writeSync(answers, rest))
}

// Applies changes of variables; those that undo them.
function change(changes) {
  return changes.map((one) => {
    const end = one.indexOf('=')
    const name = end < 0 ? one : one.slice(0, end)
    const before = process.env[name]
    if (end < 0) delete process.env[name]
    else process.env[name] = one.slice(end + 1)
    return before === undefined ? name : `${name}=${before}`
  })
}

// Its value, or that of the promise that it is.
function run(code) {
  const filename = path.join(directory(), `code-${count}.js`)
  const source = scriptOf(erase(code.replace(/^#!.*/, '')))
  const script = new vm.Script(source, { filename, importModuleDynamically: loader })
  const stopped = new Promise((_, reject) => {
    interrupted = () => reject(new Error('the code was interrupted'))
  })
  return Promise.race([script.runInThisContext({ breakOnSigint: true, displayErrors: false }), stopped])
}

// The code may have removed the one that it is in.
function directory() {
  try {
    return process.cwd()
  } catch {
    return '/'
  }
}

function shown(value) {
  return typeof value === 'string' ? value : inspect(value)
}

// The lines of a stack that are the code's own.
function stackOf(error) {
  const own = (line) => !/^\s+at /.test(line) || !(line.includes(__dirname) || line.includes('node:'))
  return String(error.stack).split('\n').filter(own).join('\n')
}

function fieldsOf(error) {
  if (error === null || typeof error !== 'object' || !('message' in error)) {
    return ['Error', shown(error), shown(error)]
  }
  return [String(error.name), String(error.message), stackOf(error)]
}

function answerError(error) {
  let fields
  try {
    fields = fieldsOf(error)
  } catch {
    // To look at it runs code of its own, which fails.
    fields = ['Error', 'an error that cannot be shown', '']
  }
  answer('error', ...fields)
}

// Each request is answered, whatever the code has done.
async function execute(stay, lent, code) {
  count += 1
  let before = []
  try {
    change(stay)
    if (stay.some((one) => one.startsWith('E2B_SANDBOX_ID='))) drawAnew()
    before = change(lent)
    const value = await run(code)
    if (value !== undefined) answer('result', shown(value))
  } catch (error) {
    answerError(error)
  } finally {
    interrupted = () => {}
    try {
      change(before)
    } finally {
      answer('done')
    }
  }
}

// All sandboxes begin as copies of this process. The engine's generator would draw the same numbers in
// each of them; the system's does not.
const drawn = new BigUint64Array(128)
let left = 0
Math.random = function random() {
  if (!left) left = getRandomValues.call(crypto, drawn).length
  left -= 1
  return Number(drawn[left] >> 11n) / 2 ** 53
}

// A copy uses up what was drawn ahead: here, and by Node.js for 1024 numbers and 128 UUIDs.
function drawAnew() {
  left = 0
  for (let n = 0; n < 1024; n++) randomInt(2)
  for (let n = 0; n < 128; n++) randomUUID()
}

// The fields that have come, until they are a request.
let fields = []
let partial = Buffer.alloc(0)

async function serve() {
  for await (const piece of new net.Socket({ fd: requests, writable: false })) {
    partial = Buffer.concat([partial, piece])
    const end = partial.lastIndexOf(0)
    if (end < 0) continue
    fields.push(...partial.subarray(0, end).toString().split('\0'))
    partial = partial.subarray(end + 1)
    await executeNext()
  }
}

// Runs the request, if it is complete: its length, a count of changes, these, the same again, the code.
async function executeNext() {
  const stay = Number(fields[1])
  const lent = Number(fields[stay + 2])
  if (!(fields.length >= stay + lent + 4)) return
  const request = fields.splice(0, stay + lent + 4)
  await execute(request.slice(2, stay + 2), request.slice(stay + 3, -1), request.at(-1))
}

// All that the code prints is in the pipes before its end is answered.
for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking?.(true)
// Code that goes on after its end may fail, and the context lives.
process.on('uncaughtException', (error) => console.error(error))
process.on('SIGINT', () => interrupted())
globalThis.require = createRequire(path.join(process.cwd(), 'code.js'))
process.argv.splice(1)
serve().finally(() => process.exit())
