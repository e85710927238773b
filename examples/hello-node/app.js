// A web server made of nothing but Node's own library.
'use strict';
const http = require('node:http');

let requests = 0;

const server = http.createServer((request, response) => {
  requests += 1;
  const url = new URL(request.url, 'http://localhost');
  const name = url.searchParams.get('name') ?? 'you';
  response.setHeader('Content-Type', 'text/plain; charset=utf-8');
  response.end(`Hello from Node ${process.versions.node.split('.')[0]}! ` +
    `Nice to meet ${name}, request ${requests}.\n`);
});

server.listen(Number(process.env.PORT ?? 8080), '0.0.0.0');
