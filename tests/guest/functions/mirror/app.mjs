// Says what an ES module sees of how Node was started.
import { createRequire } from 'node:module';
import http from 'node:http';
import fs from 'node:fs';

const started = new Error('at the top level').stack;
await null;
const seen = {
  started,
  later: new Error('after the first await').stack,
  argv: process.argv,
  execArgv: process.execArgv,
  url: import.meta.url,
  keys: Object.keys(import.meta).sort(),
  resolved: import.meta.resolve('./neighbour.js'),
  main: [typeof process.mainModule, createRequire(import.meta.url).main === undefined],
  types: [typeof globalThis.require, typeof globalThis.module, this === undefined],
  environment: Object.entries(process.env),
  cwd: process.cwd(),
  listeners: process.eventNames().map(String),
  cache: Object.keys(createRequire(import.meta.url).cache),
};
const answers = {
  '/': () => seen,
  '/loaded': () => process.moduleLoadList,
  '/import': async () => (await import('./neighbour.js')).default.NAME,
  '/thaws': () => fs.readFileSync('/dev/thaw', 'latin1').split('\0'),
};
http.createServer(async (request, response) => {
  const body = JSON.stringify(await answers[request.url]());
  response.end(body);
}).listen(8080, '0.0.0.0');
