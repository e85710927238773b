import http.server

import thaw

events = []
thaw.before_freeze(lambda: events.append("closed last"))
thaw.before_freeze(lambda: events.append("closed first"))
thaw.after_thaw(lambda generation: events.append(f"opened in {generation}"))
thaw.after_thaw(lambda generation: events.append("opened last"))
which = thaw.freeze()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = f"copy {which}: {', '.join(events)}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("", 8080), Handler).serve_forever()
