// Loaded before the program, for a build that compares two copies: at SIGPWR it draws from
// the generators of Node.js, and says what came and which times the program keeps.
'use strict';
const BEGAN = Date.now();
const LINES_MAX = 64;
const FUNCTIONS_MAX = 20000;
// The inspector gives each function with its text.
const TEXT_MAX = 20000;

// Whether a remote object is a time since the program began.
function isKept({ type, subtype, value, description }) {
  const now = Date.now();
  if (subtype === 'date') {
    // As Date.prototype.toString gives it, in whole seconds.
    const time = Date.parse(description);
    return time >= BEGAN - 1000 && time <= now;
  }
  if (type !== 'number') return false;
  const inMs = value >= BEGAN && value <= now;
  return inMs || (value >= Math.floor(BEGAN / 1000) && value <= now / 1000);
}

// Talks to the engine's inspector, which sees variables that no object leads to.
class Inspector {
  constructor() {
    const { Session } = require('node:inspector');
    this.session = new Session();
    this.session.connect();
    this.scripts = new Map();
    this.session.on('Debugger.scriptParsed', ({ params }) => {
      this.scripts.set(params.scriptId, params.url.replace(/^file:\/\//, ''));
    });
    this.post('Debugger.enable');
  }

  // Answers come before the call returns.
  post(method, params) {
    let answer;
    this.session.post(method, params, (error, result) => {
      if (error) throw new Error(error.message);
      answer = result;
    });
    return answer;
  }

  properties(objectId) {
    const found = this.post('Runtime.getProperties', { objectId, ownProperties: true });
    return { own: found.result, internal: found.internalProperties ?? [] };
  }

  functions() {
    const { result } = this.post('Runtime.evaluate', { expression: 'Function.prototype' });
    const { objects } = this.post('Runtime.queryObjects', { prototypeObjectId: result.objectId });
    const functionDeclaration = `function() {
      const text = (item) => Function.prototype.toString.call(item);
      const isShort = (item) => typeof item === 'function' && text(item).length < ${TEXT_MAX};
      return this.filter(isShort).slice(0, ${FUNCTIONS_MAX});
    }`;
    const call = { objectId: objects.objectId, functionDeclaration };
    const short = this.post('Runtime.callFunctionOn', call).result;
    return this.properties(short.objectId).own.filter(({ value }) => value?.type === 'function');
  }
}

// Whether a file is the program's own, not a library's.
function isOwn(file) {
  return file?.startsWith('/') && !/\/node_modules\/|^\/\.thaw-probe\//.test(file);
}

// Times that variables keep, and properties of objects in them.
class KeptTimes {
  constructor() {
    this.inspector = new Inspector();
    this.found = new Map();
  }

  look(name, remote, inside) {
    if (!remote || this.found.size >= LINES_MAX) return;
    if (isKept(remote)) {
      this.found.set(name, remote.description ?? String(remote.value));
    } else if (inside && remote.objectId && (remote.className === 'Object' || isClass(remote))) {
      this.lookInto(remote.objectId, (key) => `${name}.${key}`, false);
    }
  }

  // Getters are not called.
  lookInto(objectId, nameOf, inside) {
    for (const { name, value } of this.inspector.properties(objectId).own) {
      this.look(nameOf(name), value, inside);
    }
  }

  ofGlobals() {
    const { result } = this.inspector.post('Runtime.evaluate', { expression: 'globalThis' });
    this.lookInto(result.objectId, (key) => `globalThis.${key}`, false);
  }

  ofExports() {
    const { isDate, isProxy } = require('node:util').types;
    for (const [file, { exports }] of Object.entries(require.cache)) {
      if (!isOwn(file) || Object(exports) !== exports || isProxy(exports)) continue;
      for (const [key, { value }] of Object.entries(Object.getOwnPropertyDescriptors(exports))) {
        const date = isDate(value) && { subtype: 'date', description: String(value) };
        this.look(`exports.${key} in ${file}`, date || { type: typeof value, value }, false);
      }
    }
  }

  // Variables that functions of the program's own files can see. Functions share scopes, so
  // each is looked at once.
  ofFunctions() {
    const seen = new Set();
    for (const { value } of this.inspector.functions()) {
      const { internal } = this.inspector.properties(value.objectId);
      const part = (name) => internal.find((property) => property.name === name)?.value;
      const file = this.inspector.scripts.get(part('[[FunctionLocation]]')?.value?.scriptId);
      const scopes = isOwn(file) && part('[[Scopes]]');
      if (scopes) this.ofScopes(scopes, file, seen);
    }
  }

  ofScopes(scopes, file, seen) {
    for (const { value: scope } of this.inspector.properties(scopes.objectId).own) {
      if (!/^(Closure|Block|Module|Script|Class)/.test(scope?.description ?? '')) continue;
      const names = this.inspector.properties(scope.objectId).own.map(({ name }) => name);
      const key = `${file} ${names}`;
      if (seen.has(key)) continue;
      seen.add(key);
      this.lookInto(scope.objectId, (name) => `${name} in ${file}`, true);
    }
  }
}

// Whether a file of the program or of a library, as far as they are loaded, names Math.random. An
// engine without an inspector cannot tell.
function drawsFromMath() {
  try {
    const inspector = new Inspector();
    const names = ([scriptId, url]) => {
      if (/^node:|^\/\.thaw-probe\//.test(url)) return false;
      const { scriptSource } = inspector.post('Debugger.getScriptSource', { scriptId });
      return /\bMath\b/.test(scriptSource) && /\brandom\b/.test(scriptSource);
    };
    return [...inspector.scripts].some(names);
  } catch {
    return true;
  }
}

function isClass({ type, description }) {
  return type === 'function' && description?.startsWith('class');
}

function keptTimes() {
  const times = new KeptTimes();
  times.ofGlobals();
  times.ofExports();
  times.ofFunctions();
  return [...times.found].map(([name, value]) => `time ${name}=${value}`);
}

if (process.env.THAW_PROBE_SEEDED !== undefined) {
  delete process.env.THAW_PROBE_SEEDED;
  // A runtime template has seeded it before the program begins.
  Math.random();
}
process.on('SIGPWR', () => {
  const lines = [
    ...(drawsFromMath() ? [`Math.random=${Math.random()}`] : []),
    // Keeps a store of numbers that it has drawn ahead.
    `crypto.randomUUID=${require('node:crypto').randomUUID()}`,
  ];
  try {
    lines.push(...keptTimes());
  } catch {
    // An engine without an inspector.
  }
  lines.push('.');
  require('node:fs').writeSync(2, lines.map((line) => `thaw-probe ${line}\n`).join(''));
});
