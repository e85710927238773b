// A package that a template loads: it notes by whom, and draws a number.
'use strict';
exports.NAME = 'heavy';
exports.WHO = process.env.WHO;
exports.parent = () => [typeof module.parent, module.children.length, module.paths];
exports.again = () => require('./part.js').NAME;
exports.DRAWN = Math.random();
