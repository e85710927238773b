// A server of gRPC on @grpc/grpc-js whose messages are plain bytes.
import { createRequire } from "node:module";

const require = createRequire("/app/node_modules/");
const grpc = require("@grpc/grpc-js");

const same = (bytes) => bytes;
const method = (name, requestStream, responseStream) => ({
  path: `/thaw.test.Echo/${name}`,
  requestStream,
  responseStream,
  requestSerialize: same,
  requestDeserialize: same,
  responseSerialize: same,
  responseDeserialize: same,
});

let cancelled = 0;
let waiting = 0;
const server = new grpc.Server({
  "grpc.max_receive_message_length": 16 << 20,
  "grpc.max_send_message_length": 16 << 20,
});
server.addService(
  {
    Echo: method("Echo", false, false),
    Fail: method("Fail", false, false),
    Many: method("Many", false, true),
    Total: method("Total", true, false),
    Chat: method("Chat", true, true),
    Wait: method("Wait", false, false),
    Tick: method("Tick", false, true),
    Cancellations: method("Cancellations", false, false),
  },
  {
    Echo(call, done) {
      const own = call.metadata.get("x-own")[0] ?? "";
      const began = new grpc.Metadata();
      began.set("x-began", own);
      call.sendMetadata(began);
      const ended = new grpc.Metadata();
      ended.set("x-ended", own);
      ended.set("x-raw-bin", Buffer.from([0, 255]));
      done(null, call.request, ended);
    },
    Fail(call, done) {
      const [code, ...rest] = call.request.toString().split(":");
      done({ code: grpc.status[code], details: rest.join(":") });
    },
    Many(call) {
      const [number, size] = call.request.toString().split(" ").map(Number);
      for (let at = 0; at < number; at++) call.write(Buffer.alloc(size, at % 251));
      call.end();
    },
    Total(call, done) {
      let total = 0;
      call.on("data", (piece) => (total += piece.length));
      call.on("end", () => done(null, Buffer.from(String(total))));
    },
    Chat(call) {
      call.on("data", (piece) => call.write(Buffer.concat([Buffer.from("heard "), piece])));
      call.on("end", () => call.end());
    },
    Wait(call) {
      waiting++;
      call.on("cancelled", () => {
        waiting--;
        cancelled++;
      });
    },
    Tick(call) {
      const timer = setInterval(() => call.write(Buffer.from("tick")), 100);
      call.on("cancelled", () => clearInterval(timer));
    },
    Cancellations(_, done) {
      done(null, Buffer.from(`${cancelled} ${waiting}`));
    },
  },
);
server.bindAsync(`0.0.0.0:${process.env.PORT ?? 8080}`, grpc.ServerCredentials.createInsecure(), (error) => {
  if (error) throw error;
});
