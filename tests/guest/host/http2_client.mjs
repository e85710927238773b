// Asks http://ADDRESS so often over HTTP/2, eight at a time on one connection, and says how many
// requests were answered and how many failed. Those that the server has not begun are asked again.
import http2 from "node:http2";

const [address, total] = [process.argv[2], Number(process.argv[3])];
const REFUSED = http2.constants.NGHTTP2_REFUSED_STREAM;
let session;
let [asked, answered, failed] = [0, 0, 0];

function connect() {
  const own = http2.connect(`http://${address}`);
  const leave = () => session === own && connect();
  own.on("error", leave).on("goaway", leave).on("close", leave);
  session = own;
}

function ask() {
  const stream = session.request({ ":path": "/count", ":authority": "lasting" });
  let status;
  stream.on("response", (head) => (status = head[":status"]));
  stream.on("error", () => {});
  stream.on("close", () => {
    if (status === 200 && stream.rstCode === 0) answered++;
    else if (stream.rstCode === REFUSED) return ask();
    else failed++;
    next();
  });
  stream.resume();
  stream.end();
}

function next() {
  if (asked++ < total) return ask();
  if (answered + failed === total) {
    console.log(`${answered} answered, ${failed} failed`);
    process.exit(0);
  }
}

connect();
for (let i = 0; i < 8; i++) next();
