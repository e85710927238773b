// Says all that a program can see of how Node was started.
//
// Built from a runtime template, it must say the same as when it was started.
'use strict';
const started = new Error('at the top level').stack;
const asynchronous = require('async_hooks').executionAsyncId();
// A template has loaded packages already.
const loadedAtStart = Object.keys(require.cache).filter((path) => !path.includes('node_modules'));
const { execFileSync } = require('child_process');
const fs = require('fs');
const http = require('http');
const Module = require('module');
const os = require('os');
const { Worker } = require('worker_threads');

const words = (path) => fs.readFileSync(path, 'latin1').split('\0');
const listing = (object) => Object.getOwnPropertyNames(object).sort();
const CHILD = 'console.log(JSON.stringify([process.argv, process.execArgv, process.env]))';

const failure = (action) => {
  try {
    return action();
  } catch (error) {
    return [error.stack, error.code];
  }
};

const seen = {
  started,
  asynchronous,
  loadedAtStart,
  argv: process.argv,
  argv0: process.argv0,
  execArgv: process.execArgv,
  execPath: process.execPath,
  preloaded: process._preload_modules,
  title: process.title,
  environment: Object.entries(process.env),
  child: execFileSync(process.execPath, ['-e', CHILD], { encoding: 'utf8' }),
  cwd: process.cwd(),
  filename: __filename,
  isMain: [require.main === module, process.mainModule === module, module.id, module.loaded],
  parent: [typeof module.parent, module.parent, module.children.length],
  paths: module.paths,
  globalPaths: Module.globalPaths,
  module: listing(Module),
  runMain: [Module.runMain.name, String(Object.getOwnPropertyDescriptor(Module, 'runMain').writable)],
  globals: listing(globalThis),
  process: listing(process),
  listeners: process.eventNames().map(String),
  failure: failure(() => { throw new TypeError('as an example'); }),
  missing: failure(() => require('./missing')),
  cmdline: words('/proc/self/cmdline'),
  environ: words('/proc/self/environ'),
  comm: words('/proc/self/comm'),
  threads: fs.readdirSync('/proc/self/task').length,
  host: os.hostname(),
  hosts: words('/etc/hosts'),
  ids: [process.getuid(), process.getgid(), process.pid, process.ppid],
  umask: process.umask(),
  // The one file that a template leaves.
  root: fs.readdirSync('/').filter((name) => name !== '.thaw-template.js').sort(),
  links: ['/', '/app', '/usr', '/etc'].map((path) => fs.statSync(path).nlink),
  descriptors: fs.readdirSync('/proc/self/fd').map((fd) => {
    const link = failure(() => fs.readlinkSync(`/proc/self/fd/${fd}`));
    return `${fd} ${typeof link === 'string' ? link.replace(/\d+/, 'N') : 'closed'}`;
  }).sort(),
  thaws: words('/dev/thaw'),
  streams: [process.stdin.constructor.name, process.stdout.constructor.name, process.stdout.isTTY],
  input: fs.readFileSync(0, 'utf8'),
  flags: [typeof gc, process.exitCode, process.noDeprecation, Error.stackTraceLimit],
  handles: process._getActiveHandles().map((handle) => [handle.constructor.name, handle.fd]),
  resources: process.getActiveResourcesInfo(),
  zone: [process.env.TZ, new Date(0).toString()],
  dns: require('dns').getDefaultResultOrder(),
  strict: failure(() => { undeclared = 1; }),
};
if (process.argv.includes('--refuse-template') && fs.existsSync('/.thaw-template.js')) {
  process.exitCode = 7;
  throw new RangeError('somebody was here before');
}
if (process.argv.includes('--fail')) {
  process.on('exit', () => { process.exitCode = 7; });
  throw new RangeError('for nobody to catch');
}
const drawn = [Math.random(), Math.random()];

// What a thread of worker_threads says.
const INNER = `
  const { parentPort } = require('worker_threads');
  parentPort.postMessage({
    argv: process.argv, execArgv: process.execArgv, environment: process.env,
    stack: new Error('x').stack, cache: Object.keys(require.cache), main: String(require.main),
  });`;
const threads = {};
const thread = (name, options) => {
  const worker = new Worker(INNER, { eval: true, ...options });
  worker.on('message', (message) => { threads[name] = message; });
  worker.on('error', (error) => { threads[name] = String(error.stack); });
};

const order = [];
process.nextTick(() => order.push('tick'));
Promise.resolve().then(() => order.push('promise'));
setImmediate(() => order.push('immediate'));
setTimeout(() => order.push(new Error('later').stack), 0);

const answers = {
  '/': () => ({ ...seen, order, threads }),
  '/loaded': () => process.moduleLoadList,
  '/drawn': () => drawn,
  '/import': () => require('./neighbour.js').NAME,
  '/package': () => {
    const heavy = require('heavy');
    return [heavy.NAME, heavy.again(), heavy.parent(), require.resolve('heavy')];
  },
  '/who': () => [require('heavy').WHO ?? null],
  '/scope': () => require('#own').NAME,
  '/thaws': () => words('/dev/thaw'),
};
http.createServer((request, response) => {
  const body = JSON.stringify(failure(answers[request.url]));
  response.setHeader('Content-Type', 'application/json');
  response.end(body);
}).listen(8080, '0.0.0.0');
if (process.argv.includes('--threads')) {
  thread('plain', {});
  thread('given', { argv: ['x'], env: { ONE: '1' } });
}
