// Answers every request with a greeting. Node's own library is enough for that; what
// else you need, add with `npm install`.
const http = require('node:http');

// What is done here is done once, when the function is built.
const greeting = 'Hello from Node.js!';

http.createServer((request, response) => {
  const name = new URL(request.url, 'http://localhost').searchParams.get('name') ?? 'you';
  response.setHeader('Content-Type', 'text/plain; charset=utf-8');
  response.end(`${greeting} Nice to meet ${name}.\n`);
}).listen(process.env.PORT ?? 8080);
