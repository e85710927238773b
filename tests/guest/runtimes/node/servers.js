// An HTTP server and its clients, raw sockets, timers and streams in one loop.
'use strict';
const http = require('node:http');
const net = require('node:net');
const os = require('node:os');
const path = require('node:path');
const { once } = require('node:events');
const { pipeline } = require('node:stream/promises');
const { Readable, Transform } = require('node:stream');
const timers = require('node:timers/promises');

async function web() {
  const server = http.createServer(async (request, response) => {
    let body = '';
    for await (const piece of request) body += piece;
    response.end(`${request.method} ${request.url} ${body.length}`);
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const agent = new http.Agent({ keepAlive: true, maxSockets: 4 });
  const call = (i) => new Promise((resolve, reject) => {
    const options = { port: server.address().port, path: `/${i}`, method: 'POST', agent };
    const request = http.request(options, async (response) => {
      let text = '';
      for await (const piece of response) text += piece;
      resolve(text);
    });
    request.on('error', reject);
    request.end('x'.repeat(i * 10_000));
  });
  console.log((await Promise.all([...Array(12).keys()].map(call))).join('\n'));
  const answer = await fetch(`http://127.0.0.1:${server.address().port}/fetched`);
  console.log(answer.status, await answer.text());
  agent.destroy();
  server.close();
  server.closeAllConnections();
}

async function sockets(address) {
  const server = net.createServer((socket) => socket.pipe(socket));
  server.listen(address);
  await once(server, 'listening');
  const client = net.connect(typeof address === 'string' ? address : server.address().port);
  let got = 0;
  client.on('data', (data) => { got += data.length; });
  for (let i = 0; i < 20; i++) client.write(Buffer.alloc(50_000, i));
  client.end();
  await once(client, 'close');
  server.close();
  console.log('echoed', got);
}

async function main() {
  await web();
  await sockets(0);
  await sockets(path.join(os.tmpdir(), `socket-${process.pid}`));
  const order = [];
  setImmediate(() => order.push('immediate'));
  process.nextTick(() => order.push('tick'));
  await timers.setTimeout(20);
  console.log(order.join(' '), await timers.setTimeout(1, 'timer'));
  const upper = new Transform({ transform(piece, _, done) { done(null, String(piece).toUpperCase()); } });
  await pipeline(Readable.from(['streams ', 'are ', 'fine\n']), upper, process.stdout, { end: false });
  process.on('SIGUSR2', () => console.log('signal'));
  process.kill(process.pid, 'SIGUSR2');
  await timers.setTimeout(20);
}

main().catch((error) => { console.error(error); process.exit(1); });
