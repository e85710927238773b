// A module among the program's own files, which no template has seen.
'use strict';
exports.NAME = 'neighbour';
