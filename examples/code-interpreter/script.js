'use strict'

// The script that runs a piece of code as one types it at a prompt. It may await and import; its
// variables, functions and classes stay for the next one, which may declare them anew; its value is
// that of its last expression. So the code becomes the body of an async function, in which
// declarations are assignments to global variables. Lines stay where they are.

const { parse } = require('acorn')

const OPTIONS = {
  ecmaVersion: 'latest',
  allowAwaitOutsideFunction: true,
  allowHashBang: true,
  allowImportExportEverywhere: true,
}

function scriptOf(code) {
  let tree
  try {
    tree = parse(code, { ...OPTIONS, sourceType: 'module' })
  } catch {
    tree = parseSloppy(code)
  }
  // The engine says best what is wrong.
  if (!tree) return code
  const names = new Set()
  const functions = []
  const pieces = tree.body.map((node, index) => {
    const isLast = index === tree.body.length - 1
    return { node, text: rewritten(node, code, names, functions, isLast) }
  })
  const declared = names.size ? `var ${[...names].join(', ')}; ` : ''
  const hoisted = functions.map((name) => `globalThis.${name} = ${name}; `).join('')
  return `${declared}(async () => { ${hoisted}${replaced(code, pieces)}\n})()`
}

// What no module may have, such as `with` and variables named `await`.
function parseSloppy(code) {
  try {
    return parse(code, { ...OPTIONS, sourceType: 'script' })
  } catch {
    return null
  }
}

function replaced(code, pieces) {
  let text = ''
  let end = 0
  for (const { node, text: piece } of pieces) {
    text += code.slice(end, node.start) + piece
    end = node.end
  }
  return text + code.slice(end)
}

// A statement of the code as one of the function's body.
function rewritten(node, code, names, functions, isLast) {
  const text = (part) => code.slice(part.start, part.end)
  switch (node.type) {
    case 'VariableDeclaration':
      return assignments(node, text, names)
    case 'ClassDeclaration':
      names.add(node.id.name)
      return `${node.id.name} = ${text(node)};`
    case 'FunctionDeclaration':
      functions.push(node.id.name)
      return text(node)
    case 'ImportDeclaration':
      return imported(node, names)
    case 'ExportNamedDeclaration':
      return node.declaration ? rewritten(node.declaration, code, names, functions, isLast) : ';'
    case 'ExportDefaultDeclaration':
      return exported(node.declaration, code, names, functions, isLast)
    case 'ExportAllDeclaration':
      return ';'
    case 'ExpressionStatement':
      return isLast ? `return (${text(node.expression)}\n);` : `;${text(node)}`
    default:
      return text(node)
  }
}

function exported(node, code, names, functions, isLast) {
  if (node.id) return rewritten(node, code, names, functions, isLast)
  const expression = code.slice(node.start, node.end)
  return isLast ? `return (${expression}\n);` : `(${expression});`
}

function assignments(node, text, names) {
  const parts = node.declarations.map(({ id, init }) => {
    namesOf(id).forEach((name) => names.add(name))
    // `var x` leaves what x is; `let x` does not.
    if (!init) return node.kind === 'var' ? text(id) : `${text(id)} = undefined`
    return `${text(id)} = ${text(init)}`
  })
  return `;(${parts.join(', ')});`
}

// The variables of a pattern.
function namesOf(pattern) {
  switch (pattern.type) {
    case 'Identifier':
      return [pattern.name]
    case 'ObjectPattern':
      return pattern.properties.flatMap((property) => namesOf(property.value ?? property.argument))
    case 'ArrayPattern':
      return pattern.elements.filter(Boolean).flatMap(namesOf)
    case 'AssignmentPattern':
      return namesOf(pattern.left)
    default:
      return namesOf(pattern.argument)
  }
}

function imported(node, names) {
  const module = `await import(${node.source.raw})`
  const all = node.specifiers.find(({ type }) => type === 'ImportNamespaceSpecifier')
  node.specifiers.forEach(({ local }) => names.add(local.name))
  const named = node.specifiers.filter((one) => one !== all)
  const fields = named.map((one) => {
    const from = one.imported ? (one.imported.raw ?? one.imported.name) : 'default'
    return `${from}: ${one.local.name}`
  })
  const whole = all ? `${all.local.name} = ` : ''
  return fields.length ? `;({ ${fields.join(', ')} } = ${whole}${module});` : `;${whole}${module};`
}

module.exports = { scriptOf }
