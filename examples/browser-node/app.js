// A headless Chromium that has started, and has drawn a page, before the first request.
'use strict';
const http = require('node:http');
const puppeteer = require('puppeteer-core');

const GREETING = '<title>Hello</title><h1>Hello from <script>document.write(navigator.vendor)</script>!</h1>';

async function body(request) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  return Buffer.concat(chunks).toString();
}

/** Shows what a client sent, and answers with its text or with a picture of it. */
async function answer(page, request, response) {
  await page.setContent((await body(request)) || GREETING, { waitUntil: 'load' });
  if (request.url.startsWith('/picture')) {
    response.setHeader('Content-Type', 'image/png');
    response.end(await page.screenshot());
  } else if (request.url.startsWith('/pdf')) {
    response.setHeader('Content-Type', 'application/pdf');
    response.end(await page.pdf());
  } else {
    response.end(`${await page.evaluate('document.body.innerText')}\n`);
  }
}

async function main() {
  const browser = await puppeteer.launch({
    executablePath: '/usr/lib/chromium/chromium',
    pipe: true,
    // It runs in a sandbox already, and draws without a graphics card.
    args: ['--no-sandbox', '--disable-gpu'],
  });
  const page = await browser.newPage();
  await page.setContent(GREETING);
  await page.screenshot();
  const server = http.createServer((request, response) => {
    answer(page, request, response).catch((error) => {
      response.statusCode = 500;
      response.end(`${error}\n`);
    });
  });
  server.listen(Number(process.env.PORT ?? 8080), '0.0.0.0');
}

main();
