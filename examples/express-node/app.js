// An Express application that does some work: it parses CSV, keeps it in files,
// compresses it, computes in a worker thread, and echoes over a WebSocket.
'use strict';
const crypto = require('node:crypto');
const fs = require('node:fs/promises');
const http = require('node:http');
const os = require('node:os');
const path = require('node:path');
const { promisify } = require('node:util');
const { Worker, isMainThread, parentPort, workerData } = require('node:worker_threads');
const zlib = require('node:zlib');

if (!isMainThread) {
  parentPort.postMessage(countPrimes(workerData));
  return;
}

const express = require('express');
const { WebSocketServer } = require('ws');

const app = express();
const directory = path.join(os.tmpdir(), 'tables');

function countPrimes(limit) {
  const composite = new Uint8Array(limit + 1);
  let count = 0;
  for (let i = 2; i <= limit; i++) {
    if (composite[i]) continue;
    count += 1;
    for (let j = i * i; j <= limit; j += i) composite[j] = 1;
  }
  return count;
}

app.get('/', (request, response) => {
  response.type('text').send(`Hello from Express, ${request.query.name ?? 'you'}!\n`);
});

// Sums the columns of a CSV table and keeps it, compressed, under its hash.
app.post('/tables', express.text({ type: () => true, limit: '5mb' }), async (request, response) => {
  const [header, ...rows] = request.body.trim().split('\n').map((line) => line.split(','));
  const sums = Object.fromEntries(header.map((column, i) =>
    [column, rows.reduce((sum, row) => sum + Number(row[i]), 0)]));
  const id = crypto.createHash('sha256').update(request.body).digest('hex').slice(0, 16);
  await fs.mkdir(directory, { recursive: true });
  const packed = await promisify(zlib.gzip)(request.body);
  await fs.writeFile(path.join(directory, id), packed);
  const unpacked = await promisify(zlib.gunzip)(await fs.readFile(path.join(directory, id)));
  response.json({ id, rows: rows.length, sums, kept: unpacked.toString() === request.body });
});

app.get('/primes/:limit', (request, response, next) => {
  const limit = Math.min(Number(request.params.limit) || 0, 10_000_000);
  const worker = new Worker(__filename, { workerData: limit });
  worker.once('message', (count) => response.json({ limit, count }));
  worker.once('error', next);
});

const server = http.createServer(app);
new WebSocketServer({ server, path: '/echo' }).on('connection', (socket) => {
  socket.on('message', (data) => socket.send(`echo: ${data}`));
});
server.listen(Number(process.env.PORT ?? 8080), '0.0.0.0');
