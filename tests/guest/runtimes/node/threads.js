// Worker threads: messages, shared memory, atomics; and what Node does in its
// own threads: files, compression, key derivation, name look-ups.
'use strict';
const assert = require('node:assert');
const crypto = require('node:crypto');
const dns = require('node:dns/promises');
const fs = require('node:fs/promises');
const os = require('node:os');
const path = require('node:path');
const { promisify } = require('node:util');
const { Worker, isMainThread, parentPort, workerData, threadId } = require('node:worker_threads');
const zlib = require('node:zlib');

if (!isMainThread) {
  const counters = new Int32Array(workerData.shared);
  for (let i = 0; i < 10_000; i++) Atomics.add(counters, 0, 1);
  Atomics.wait(counters, 1, 0);
  parentPort.postMessage({ number: workerData.number, main: threadId === 0 });
} else {
  main().catch((error) => { console.error(error); process.exit(1); });
}

async function workers() {
  const shared = new SharedArrayBuffer(8);
  const counters = new Int32Array(shared);
  const all = [0, 1, 2, 3].map((number) => new Worker(__filename, { workerData: { number, shared } }));
  const answers = all.map((worker) => new Promise((resolve, reject) => {
    worker.once('message', resolve);
    worker.once('error', reject);
  }));
  const ends = all.map((worker) => new Promise((go) => worker.once('exit', go)));
  while (Atomics.load(counters, 0) < 40_000) await new Promise((go) => setTimeout(go, 1));
  Atomics.store(counters, 1, 1);
  Atomics.notify(counters, 1);
  const sorted = (await Promise.all(answers)).sort((a, b) => a.number - b.number);
  console.log(counters[0], JSON.stringify(sorted));
  console.log(await Promise.all(ends));
}

async function files() {
  const directory = await fs.mkdtemp(path.join(os.tmpdir(), 'node-'));
  const names = [...Array(20).keys()].map((i) => path.join(directory, `file ${i}`));
  await Promise.all(names.map((name, i) => fs.writeFile(name, `content ${i}\n`.repeat(i + 1))));
  const sizes = await Promise.all(names.map(async (name) => (await fs.stat(name)).size));
  console.log(sizes.join(' '));
  await fs.rename(names[0], path.join(directory, 'renamed'));
  await fs.appendFile(path.join(directory, 'renamed'), 'more');
  console.log(await fs.readFile(path.join(directory, 'renamed'), 'utf8'));
  console.log((await fs.readdir(directory)).length);
  const file = await fs.open(names[1], 'r+');
  await file.write('CONTENT', 0);
  await file.truncate(12);
  console.log((await file.readFile()).toString());
  await file.close();
  await fs.rm(directory, { recursive: true });
  await assert.rejects(fs.access(directory), { code: 'ENOENT' });
}

async function pool() {
  const data = Buffer.alloc(1_000_000, 'thaw ');
  const packed = await Promise.all([1, 2, 3].map(() => promisify(zlib.brotliCompress)(data)));
  const unpacked = await promisify(zlib.brotliDecompress)(packed[2]);
  console.log(unpacked.equals(data));
  const keys = await Promise.all(['a', 'b'].map((p) => promisify(crypto.scrypt)(p, 'salt', 32)));
  console.log(keys.map((key) => key.toString('hex')).join(' '));
  console.log(await dns.lookup('localhost', { family: 4 }));
}

function compute() {
  // Long enough for the optimizing compiler, which works in a thread.
  let state = 1n, sum = 0;
  for (let i = 0; i < 3_000_000; i++) sum = (sum + Math.imul(i, 2654435761)) | 0;
  for (let i = 0; i < 20_000; i++) state = (state * 6364136223846793005n + 1442695040888963407n) & 0xffffffffffffffffn;
  console.log(sum, state.toString());
  // Garbage for the collector and its helper threads.
  let list = [];
  for (let round = 0; round < 20; round++) list = Array.from({ length: 50_000 }, (_, i) => ({ i, text: `${i}` }));
  console.log(list.length, JSON.stringify(list[49_999]));
  const add = new WebAssembly.Instance(new WebAssembly.Module(Uint8Array.from([
    0, 97, 115, 109, 1, 0, 0, 0, 1, 7, 1, 96, 2, 127, 127, 1, 127, 3, 2, 1, 0, 7, 7, 1, 3,
    97, 100, 100, 0, 0, 10, 9, 1, 7, 0, 32, 0, 32, 1, 106, 11]))).exports.add;
  console.log(add(40, 2));
}

async function main() {
  compute();
  await files();
  await pool();
  await workers();
}
