// Shows what must differ between copies of one image, and what must not.
'use strict';
const crypto = require('node:crypto');
const fs = require('node:fs');
const http = require('node:http');
const os = require('node:os');
const { Worker } = require('node:worker_threads');

const read = (path) => fs.readFileSync(path, 'ascii').trim();
// OpenSSL's generator is seeded before the freeze.
crypto.randomBytes(16);
// A thread that is asleep when the program is frozen, and a timer of the main one.
const shared = new Int32Array(new SharedArrayBuffer(4));
new Worker(
  `const { workerData } = require('node:worker_threads');
   for (;;) { Atomics.wait(workerData, 0, -1, 10) ; Atomics.add(workerData, 0, 1);
     Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 10); }`,
  { eval: true, workerData: shared },
);
let timed = 0;
setInterval(() => { timed += 1; }, 10);

http.createServer((_request, response) => {
  const before = [Atomics.load(shared, 0), timed];
  setTimeout(() => {
    response.end(JSON.stringify({
      unique: {
        bytes: crypto.randomBytes(16).toString('hex'),
        uuid: crypto.randomUUID(),
        web: Buffer.from(crypto.webcrypto.getRandomValues(new Uint8Array(16))).toString('hex'),
        boot_id: read('/proc/sys/kernel/random/boot_id'),
      },
      hostname: os.hostname(),
      pid: process.pid,
      time: Date.now() / 1000,
      ticked: Math.min(Atomics.load(shared, 0) - before[0], timed - before[1]),
      greeting: process.env.GREETING,
      limit: read('/sys/fs/cgroup/memory.max'),
    }));
  }, 100);
}).listen(8080, '0.0.0.0');
