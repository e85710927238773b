"""AES in counter mode, in pure Python: encrypts and decrypts."""

import hashlib

import pyaes

KEY = bytes(range(16))


def run(length=2_000, times=2):
    message = bytes(i % 251 for i in range(length))
    encrypted = b""
    for _ in range(times):
        encrypted = pyaes.AESModeOfOperationCTR(KEY).encrypt(message)
        assert pyaes.AESModeOfOperationCTR(KEY).decrypt(encrypted) == message
    return hashlib.sha256(encrypted).hexdigest()
