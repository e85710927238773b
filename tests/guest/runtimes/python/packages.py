"""Packages from PyPI with native code, doing some work each."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import boto3
import cv2
import numpy
import pandas
import requests
import scipy.fft
import scipy.optimize
from botocore.config import Config
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
from PIL import Image

random = numpy.random.default_rng(7)
square = random.random((400, 400))
print("numpy", round(float(numpy.linalg.norm(square @ numpy.linalg.inv(square) - numpy.eye(400))), 6))
print("scipy", scipy.optimize.brentq(lambda x: x**3 - 2, 0, 2).__round__(9))
print("scipy", abs(scipy.fft.fft(numpy.sin(numpy.arange(64) * numpy.pi / 8))).argmax())

table = pandas.DataFrame({"kind": ["a", "b", "a", "c"], "price": [1.5, 2, 3, 4]})
print(table.groupby("kind").price.agg(["sum", "mean"]).to_json())
print(pandas.read_csv(io.StringIO(table.to_csv(index=False))).equals(table))

picture = Image.linear_gradient("L").resize((64, 48))
encoded = io.BytesIO()
picture.save(encoded, "PNG")
print("Pillow", Image.open(encoded).size, picture.getpixel((10, 40)))
edges = cv2.Canny(cv2.resize(numpy.array(picture), (128, 96)), 10, 50)
print("OpenCV", edges.shape, cv2.imdecode(numpy.frombuffer(encoded.getvalue(), numpy.uint8), 0).mean().round(3))

key = Fernet.generate_key()
print("Fernet", Fernet(key).decrypt(Fernet(key).encrypt(b"secret")))
signer = ed25519.Ed25519PrivateKey.generate()
signer.public_key().verify(signer.sign(b"text"), b"text")
private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), None)
print("RSA", private.decrypt(private.public_key().encrypt(b"text", oaep), oaep))


class Api(BaseHTTPRequestHandler):
    """Answers like a web service, and like an object store."""

    def do_GET(self):
        body = json.dumps({"path": self.path, "agent": self.headers["X-Agent"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        length = int(self.headers["Content-Length"])
        self.rfile.read(length)
        self.send_response(200)
        self.send_header("ETag", '"tag"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Api)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
session = requests.Session()
session.trust_env = False
print("requests", session.get(url + "/a", params={"b": 1}, headers={"X-Agent": "x"}).json())
store = boto3.client(
    "s3",
    endpoint_url=url,
    region_name="here",
    aws_access_key_id="a",
    aws_secret_access_key="b",
    config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}),
)
print("boto3", store.put_object(Bucket="bucket", Key="key", Body=b"body")["ETag"])
server.shutdown()
