// Loaded before the program, for a build that compares two copies: at SIGPWR it draws from
// the generators of Node.js and says what came.
'use strict';
process.on('SIGPWR', () => {
  const lines = [
    `Math.random=${Math.random()}`,
    // Keeps a store of numbers that it has drawn ahead.
    `crypto.randomUUID=${require('node:crypto').randomUUID()}`,
    '.',
  ];
  require('node:fs').writeSync(2, lines.map((line) => `thaw-probe ${line}\n`).join(''));
});
