"""Extension modules: sqlite3, compression, hashes, ssl, ctypes, XML, e-mail."""
import base64
import binascii
import bz2
import ctypes
import email.message
import email.parser
import gzip
import hashlib
import hmac
import html
import html.parser
import io
import ipaddress
import lzma
import os
import secrets
import shelve
import sqlite3
import ssl
import tempfile
import tomllib
import urllib.parse
import uuid
import xml.etree.ElementTree as ElementTree
import zlib
from configparser import ConfigParser

data = bytes(range(256)) * 200

print("-- compression")
for module in (zlib, bz2, lzma, gzip):
    packed = module.compress(data) if module is not gzip else module.compress(data, mtime=0)
    print(module.__name__, len(packed) < len(data), module.decompress(packed) == data)
print(zlib.crc32(data), zlib.adler32(data), binascii.crc32(b"x"))
try:
    zlib.decompress(b"not compressed")
except zlib.error as error:
    print(error)

print("-- hashes")
for name in sorted(hashlib.algorithms_guaranteed):
    digest = hashlib.new(name, data)
    print(name, digest.hexdigest(16) if name.startswith("shake") else digest.hexdigest())
print(hmac.new(b"key", data, "sha256").hexdigest())
print(hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 1000).hex())
print(hashlib.scrypt(b"password", salt=b"salt", n=16, r=8, p=1).hex())
print(base64.b64encode(data[:20]), base64.b32encode(b"x"), base64.a85encode(b"hello"))
print(len(secrets.token_bytes(32)), secrets.token_hex(8) != secrets.token_hex(8))
print(uuid.uuid5(uuid.NAMESPACE_DNS, "example.org"), uuid.uuid4().version, uuid.uuid4() != uuid.uuid4())

print("-- sqlite3")
scratch = tempfile.mkdtemp(prefix="thaw-guest-")
path = os.path.join(scratch, "data.db")
for name in (":memory:", path):
    with sqlite3.connect(name) as database:
        database.execute("create table t (id integer primary key, name text, value real)")
        database.executemany("insert into t (name, value) values (?, ?)", [(f"n{i}", i * 1.5) for i in range(1000)])
        database.execute("create index i on t (name)")
        database.commit()
        print(database.execute("select count(*), sum(value), min(name) from t").fetchone())
        try:
            with database:
                database.execute("delete from t")
                raise RuntimeError
        except RuntimeError:
            pass
        print(database.execute("select count(*) from t where name like 'n1%'").fetchone())
        print(database.execute("select * from t order by name desc limit 2").fetchall())
    database.close()
database = sqlite3.connect(path)
print(database.execute("pragma journal_mode = wal").fetchone())
database.execute("insert into t (name) values ('wal')")
database.commit()
print(database.execute("pragma integrity_check").fetchone(), sorted(os.listdir(scratch)))
second = sqlite3.connect(path, timeout=0)
database.execute("begin immediate")
try:
    second.execute("begin immediate")
except sqlite3.OperationalError as error:
    print(error)
database.rollback()
second.close()
database.close()
print(sorted(os.listdir(scratch)))
with shelve.open(os.path.join(scratch, "shelf")) as shelf:
    shelf["key"] = {"nested": [1, 2]}
with shelve.open(os.path.join(scratch, "shelf")) as shelf:
    print(dict(shelf))
for name in os.listdir(scratch):
    os.unlink(os.path.join(scratch, name))
os.rmdir(scratch)

print("-- ctypes")
libc = ctypes.CDLL(None, use_errno=True)
print(libc.abs(-5), libc.strlen(b"hello"), ctypes.sizeof(ctypes.c_long))
print(libc.open(b"/absent", 0), ctypes.get_errno())
compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
numbers = (ctypes.c_int * 5)(5, 3, 1, 4, 2)
libc.qsort(numbers, 5, 4, compare(lambda a, b: a[0] - b[0]))
print(list(numbers))

print("-- ssl")
context = ssl.create_default_context()
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
tls = context.wrap_bio(incoming, outgoing, server_hostname="example.org")
try:
    tls.do_handshake()
except ssl.SSLWantReadError:
    hello = outgoing.read()
    print("client hello", hello[:2].hex(), len(hello) > 100)
print(ssl.RAND_bytes(8) != ssl.RAND_bytes(8), context.minimum_version.name)

print("-- formats")
root = ElementTree.fromstring("<a x='1'><b>text</b><b/></a>")
print(root.attrib, [element.text for element in root.iter("b")], ElementTree.tostring(root))
message = email.message.EmailMessage()
message["Subject"] = "ü"
message.set_content("body\n")
print(email.parser.Parser().parsestr(message.as_string())["Subject"])
print(tomllib.loads('a = 1\n[b]\nc = ["x"]'), html.escape("<&>"), html.unescape("&eacute;"))
config = ConfigParser()
config.read_string("[section]\nkey = value\n")
print(config["section"]["key"], ipaddress.ip_network("10.0.0.0/30").num_addresses)
url = urllib.parse.urlsplit("http://user@host:8080/p/a?q=1&q=2#f")
print(url.port, urllib.parse.parse_qs(url.query), urllib.parse.quote("ü/ x"), urllib.parse.urljoin("http://a/b/c", "../d"))


class Links(html.parser.HTMLParser):
    def handle_starttag(self, tag, attrs):
        print(tag, attrs)


Links().feed("<a href='x'>y</a>")
with gzip.open(io.BytesIO(gzip.compress(b"line 1\nline 2\n")), "rt") as lines:
    print(lines.readlines())
