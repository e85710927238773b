'use strict'

// JavaScript of TypeScript: types are replaced by blanks, so that lines and columns stay. Code with
// other things than types, such as an enum, is written anew.

const { transformSync } = require('amaro')

function erase(code) {
  try {
    return transformSync(code, { mode: 'strip-only' }).code
  } catch (problem) {
    if (problem.code === 'UnsupportedSyntax') return transform(code)
    throw syntaxError(problem)
  }
}

function transform(code) {
  try {
    return transformSync(code, { mode: 'transform' }).code
  } catch (problem) {
    throw syntaxError(problem)
  }
}

function syntaxError(problem) {
  const error = new SyntaxError(problem.message)
  error.stack = `SyntaxError: ${problem.message}\n${problem.snippet ?? ''}`
  return error
}

module.exports = { erase }
