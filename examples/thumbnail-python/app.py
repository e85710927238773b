"""A thumbnail service: POST an image, get a small one back.

    curl --data-binary @photo.jpg 'http://…/?width=128&format=png' -o small.png

The heavy part of its start, importing Pillow and its codecs, happens once,
before the freeze: Pillow's plugins are loaded at import time below.
"""

import io
import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

from PIL import Image, ImageOps, UnidentifiedImageError

Image.init()

MAX_BYTES = 20 << 20
FORMATS = {"png": ("PNG", "image/png"), "jpeg": ("JPEG", "image/jpeg")}


class BadRequest(Exception):
    """The client sent something that is no image, or wants the impossible."""


def thumbnail(data, width, height, kind):
    """Shrinks the image in `data` to fit into `width` x `height` pixels."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            small = ImageOps.exif_transpose(image)
            small.thumbnail((width, height))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        raise BadRequest(f"this is not an image that can be read ({type(error).__name__})") from error
    if kind == "JPEG" and small.mode not in ("RGB", "L"):
        small = small.convert("RGB")
    out = io.BytesIO()
    small.save(out, kind)
    return out.getvalue()


def number(query, name, default):
    text = query.get(name, [str(default)])[0]
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise BadRequest(f"{name} must be between 1 and 4096, not {text!r}")
    return int(text)


class Handler(BaseHTTPRequestHandler):
    """`GET /` explains; `POST /` makes a thumbnail."""

    def do_GET(self):
        text = "POST an image to /?width=128&height=128&format=png (or jpeg).\n"
        self.reply(200, "text/plain", text.encode())

    def do_POST(self):
        query = parse_qs(urlsplit(self.path).query)
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if length > MAX_BYTES:
                raise BadRequest(f"at most {MAX_BYTES >> 20} MiB")
            width = number(query, "width", 128)
            height = number(query, "height", width)
            name = query.get("format", ["png"])[0]
            if name not in FORMATS:
                raise BadRequest(f"format must be png or jpeg, not {name!r}")
            kind, mime = FORMATS[name]
            small = thumbnail(self.rfile.read(length), width, height, kind)
        except BadRequest as error:
            body = json.dumps({"error": str(error)}) + "\n"
            self.reply(400, "application/json", body.encode())
            return
        self.reply(200, mime, small)

    def reply(self, status, mime, body):
        self.send_response(status)
        self.send_header("Content-Type", mime)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    port = int(os.environ.get("PORT", "8080"))
    HTTPServer(("0.0.0.0", port), Handler).serve_forever()
