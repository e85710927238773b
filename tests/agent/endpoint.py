"""A server with OpenAI's chat completions whose answers are those of examples/agent's script.

It prints its address, and after that each model that is asked for. argv[1] is the example's directory.
"""

import http.server
import itertools
import json
import sys

sys.path.insert(0, sys.argv[1])
import model  # noqa: E402

turn = itertools.count()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answers = model.ScriptedModel().propose(asked["messages"][-1]["content"], 16)
        is_known = self.path == "/v1/chat/completions" and self.headers["Authorization"] == "Bearer k"
        message = {"role": "assistant", "content": answers[next(turn) % len(answers)]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"],
                "choices": [choice]}
        text = json.dumps(body).encode()
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        # One write: requests come side by side.
        sys.stdout.write(asked["model"] + "\n")
        sys.stdout.flush()

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
server.serve_forever()
