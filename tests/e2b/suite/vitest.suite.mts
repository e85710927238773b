// The tests of E2B's JavaScript SDKs that need no browser and no bundler.
import { existsSync } from 'node:fs'
import { defineConfig } from 'vitest/config'

const setup = 'tests/globalFetchFallback.setup.ts'

export default defineConfig({
  test: {
    include: ['tests/**/*.test.ts'],
    exclude: ['tests/runtimes/**', 'tests/bundle/**'],
    isolate: true,
    testTimeout: 30_000,
    setupFiles: existsSync(setup) ? [setup] : [],
    env: process.env as Record<string, string>,
  },
})
