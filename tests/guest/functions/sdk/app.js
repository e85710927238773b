'use strict';
const http = require('node:http');
const thaw = require('./thaw');

const events = [];
thaw.beforeFreeze(() => events.push('closed last'));
thaw.beforeFreeze(() => events.push('closed first'));
thaw.afterThaw((generation) => events.push(`opened in ${generation}`));
thaw.afterThaw(() => events.push('opened last'));
const which = thaw.freeze();

http.createServer((request, response) => {
  response.end(`copy ${which}: ${events.join(', ')}\n`);
}).listen(8080);
