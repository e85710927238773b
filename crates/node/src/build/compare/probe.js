// Loaded before the program, for a build that compares two copies: at SIGPWR it draws from
// the generators of Node.js and says what came.
'use strict';
if (process.env.THAW_PROBE_SEEDED !== undefined) {
  delete process.env.THAW_PROBE_SEEDED;
  // A runtime template has seeded it before the program begins.
  Math.random();
}
process.on('SIGPWR', () => {
  const lines = [
    `Math.random=${Math.random()}`,
    // Keeps a store of numbers that it has drawn ahead.
    `crypto.randomUUID=${require('node:crypto').randomUUID()}`,
    '.',
  ];
  require('node:fs').writeSync(2, lines.map((line) => `thaw-probe ${line}\n`).join(''));
});
