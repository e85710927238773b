// Turns Node into a runtime template, and its copies into programs.
//
// Node loads this file as `--require` (NODE_OPTIONS) within its own start, before it looks at
// the program. So whatever runs afterwards runs as it would have without a template: no frame of
// this file is below it. `docs/decisions/0046-templates-of-each-language.md` says why it is done so.
'use strict';

const Module = require('module');
const fs = require('fs');
const path = require('path');

const WORD = 'thaw-template';
const PACKAGES = '--packages=';

// Threads of worker_threads load this path as well: Node gives them its options, and nothing can
// change those. For them, it becomes a module that does nothing and is not there afterwards.
function leaveEmptyModule() {
  fs.unlinkSync(__filename);
  fs.writeFileSync(__filename, "'use strict';\ndelete require.cache[__filename];\n");
}

// Removes what tells of this file in the main thread.
function hide() {
  delete require.cache[__filename];
  for (const key of Object.keys(Module._pathCache)) {
    if (Module._pathCache[key] === __filename) delete Module._pathCache[key];
  }
  // Node's own list, which `--require` is read from in this thread.
  process._preload_modules.length = 0;
}

function words(file) {
  return fs.readFileSync(file, 'utf8').split('\0').slice(0, -1);
}

// Looks for a module from within a directory of packages, where Node reads no package.json but
// those of the packages: the program's own may be another one in each function.
function loadFrom(directories, name) {
  const missing = [];
  for (const directory of directories) {
    const asking = path.join(directory, WORD);
    const require = Module.createRequire(asking);
    let file;
    try {
      file = require.resolve(name);
    } catch (error) {
      if (error.code !== 'MODULE_NOT_FOUND') throw error;
      missing.push(directory);
      continue;
    }
    require(file);
    giveToProgram(file, asking);
    return;
  }
  throw new Error(`no module ${name} is in ${missing.join(', ')}`);
}

// The program is the first that asks for a module: its main module is the parent, or nobody is if
// that is an ES module.
function giveToProgram(file, asked) {
  const module = require.cache[file];
  // Another package may have loaded it before.
  if (module?.parent?.filename !== asked) return;
  module.parent.children.length = 0;
  const set = (value) => Object.defineProperty(module, 'parent', { value, writable: true });
  Object.defineProperty(module, 'parent', {
    configurable: true,
    get: () => process.mainModule,
    set,
  });
}

// Loads the modules of a template: those of Node, or those of packages.
function load(names) {
  let directories = null;
  for (const name of names) {
    if (name.startsWith(PACKAGES)) {
      directories = name.slice(PACKAGES.length).split(':');
    } else if (directories === null) {
      require(`node:${name}`);
    } else {
      loadFrom(directories, name);
    }
  }
}

// Throws away what nobody refers to, so that it is in no image.
function collectGarbage() {
  const v8 = require('v8');
  v8.setFlagsFromString('--expose-gc');
  const collect = require('vm').runInNewContext('gc');
  v8.setFlagsFromString('--no-expose-gc');
  collect();
  collect();
}

function freeze() {
  collectGarbage();
  const device = fs.openSync('/dev/thaw', 'w');
  try {
    fs.writeSync(device, 'template');
  } finally {
    fs.closeSync(device);
  }
}

function takeEnvironment() {
  for (const name of Object.keys(process.env)) delete process.env[name];
  for (const variable of words('/proc/self/environ')) {
    const end = variable.indexOf('=');
    process.env[variable.slice(0, end)] = variable.slice(end + 1);
  }
  // Reads NODE_PATH.
  Module._initPaths();
  // Node keeps the working directory, and looks again after this.
  process.chdir(fs.readlinkSync('/proc/self/cwd'));
}

// V8 seeds Math.random when it is first called, from a generator that is in the template. A
// number given as its seed goes before that.
function drawAgain() {
  const v8 = require('v8');
  const seed = require('crypto').randomBytes(4).readInt32LE() || 1;
  v8.setFlagsFromString(`--random-seed=${seed}`);
  Math.random();
  v8.setFlagsFromString('--random-seed=0');
}

// Has Node run the program when this file is done. Node looks up `Module.runMain` and calls it. What
// it finds is its own function, bound to the program, which is no frame of its own.
function run(program) {
  const main = path.resolve(program[0]);
  process.argv.splice(1, process.argv.length, main, ...program.slice(1));
  const own = Object.getOwnPropertyDescriptor(Module, 'runMain');
  Object.defineProperty(Module, 'runMain', {
    configurable: true,
    get() {
      Object.defineProperty(Module, 'runMain', own);
      return own.value.bind(Module, main);
    },
  });
}

leaveEmptyModule();
hide();
let given = process.argv.slice(2);
for (;;) {
  load(given);
  freeze();
  takeEnvironment();
  const now = words('/proc/self/cmdline');
  if (now[1] !== WORD) {
    drawAgain();
    run(now.slice(1));
    break;
  }
  given = now.slice(2);
}
