// Child processes: their streams, ends and messages.
'use strict';
const { execFile, execFileSync, exec, fork, spawn, spawnSync } = require('node:child_process');
const { once } = require('node:events');
const { promisify } = require('node:util');

if (process.argv[2] === 'child') {
  process.on('message', (message) => {
    if (message === 'end') process.exit(4);
    process.send({ squared: message.number ** 2 });
  });
} else {
  main().catch((error) => { console.error(error); process.exit(1); });
}

async function main() {
  console.log(execFileSync('echo', ['synchronous']).toString());
  console.log((await promisify(execFile)('sh', ['-c', 'echo out; echo err >&2'])).stderr);
  const failed = await promisify(exec)('echo before; exit 3').catch((error) => error);
  console.log(failed.code, failed.stdout);
  console.log(spawnSync('sleep', ['20'], { timeout: 100 }).signal);
  console.log(spawnSync('/no/such/program').error.code);
  const sort = spawn('sort', ['-n']);
  sort.stdin.end([...Array(5000).keys()].reverse().join('\n'));
  let text = '';
  sort.stdout.on('data', (piece) => { text += piece; });
  console.log(await once(sort, 'close'), text.split('\n')[4999]);
  const killed = spawn('sleep', ['20']);
  killed.kill('SIGKILL');
  console.log(await once(killed, 'exit'));
  const child = fork(__filename, ['child']);
  for (const number of [3, 4]) {
    child.send({ number });
    console.log(JSON.stringify((await once(child, 'message'))[0]));
  }
  child.send('end');
  console.log(await once(child, 'exit'));
}
