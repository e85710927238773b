'use strict';
/**
 * Ask Thaw to freeze this program, and learn which copy of it this is.
 *
 *     const thaw = require('./thaw');
 *
 *     thaw.beforeFreeze(() => connections.close());  // what no two copies may share
 *     thaw.afterThaw((generation) => connections.open());
 *     loadEverything();
 *     const generation = thaw.freeze();              // copies begin here
 *
 * One file without dependencies: copy it beside your program. It talks to
 * `/dev/thaw`, which every sandbox has. Outside a sandbox, `freeze()` does nothing
 * and returns 0, so that the same program runs anywhere.
 */

const fs = require('node:fs');

const DEVICE = '/dev/thaw';
const before = [];
const after = [];

/** Call `hook()` before a freeze; the last one given is called first. */
function beforeFreeze(hook) {
  before.push(hook);
}

/**
 * Call `hook(generation)` when `freeze()` goes on, in the order given: in every
 * copy, and in the original too if it was not ended.
 */
function afterThaw(hook) {
  after.push(hook);
}

/**
 * Which copy this is: 0 for the original, n for a copy of the n-th generation. A
 * copy of a copy that was frozen again is of the next generation.
 */
function generation() {
  try {
    return Number.parseInt(fs.readFileSync(DEVICE, 'latin1'), 10);
  } catch (error) {
    if (error.code === 'ENOENT') return 0;
    throw error;
  }
}

/**
 * Freeze the program here, if somebody wants that, and return `generation()`.
 *
 * Comes back at once if nobody does (`thaw run`), or if this is a copy already.
 * Nothing else happens in the program meanwhile. The function says
 * `freeze = "program"` in `[entry]` of its thaw.toml if it waits for clients
 * earlier.
 */
function freeze() {
  let device;
  try {
    device = fs.openSync(DEVICE, 'r+');
  } catch (error) {
    if (error.code === 'ENOENT') return 0;
    throw error;
  }
  try {
    for (const hook of before.slice().reverse()) hook();
    fs.writeSync(device, 'freeze');
  } finally {
    fs.closeSync(device);
  }
  const which = generation();
  for (const hook of after) hook(which);
  return which;
}

module.exports = { beforeFreeze, afterThaw, generation, freeze };
