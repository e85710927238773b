// Leaves only those packages in a package.json that its tests import, and no scripts:
//   node packages.mjs package.json
import { readFileSync, writeFileSync } from 'node:fs'

const wanted = ['vitest', 'msw', 'dotenv', 'error-stack-parser-es', 'typescript', '@types/node']
const path = process.argv[2]
const { scripts: _, ...description } = JSON.parse(readFileSync(path, 'utf8'))
const tools = Object.entries(description.devDependencies ?? {})
description.devDependencies = Object.fromEntries(tools.filter(([name]) => wanted.includes(name)))
writeFileSync(path, JSON.stringify(description, null, 2))
