'use strict';
/**
 * Replaces what Math.random draws from, so that no two copies of this program draw the same.
 *
 *     node --require ./thaw-random.js app.js      // or require('./thaw-random') first
 *
 * V8 keeps the state of its generator, and numbers that it has drawn ahead, in memory: copies
 * of a frozen program go on from there, all alike. This asks for random bytes of the system at
 * every call, which takes a microsecond, and keeps nothing. crypto.randomUUID() keeps UUIDs that
 * it has made ahead; here it does not. One file without dependencies: copy it beside your program.
 */

const crypto = require('node:crypto');

const bytes = new Uint32Array(2);

/** A number from 0 to less than 1 with 53 random bits, as Math.random gives it. */
Math.random = function random() {
  crypto.getRandomValues(bytes);
  return (bytes[0] * 2 ** 21 + (bytes[1] >>> 11)) / 2 ** 53;
};

const { randomUUID } = crypto;
crypto.randomUUID = function uuid(options) {
  return randomUUID({ ...options, disableEntropyCache: true });
};
