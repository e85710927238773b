"""Language features that lean on the operating system or on big libraries."""
import array
import ast
import bisect
import collections
import contextlib
import copy
import csv
import datetime
import decimal
import enum
import fractions
import functools
import gc
import heapq
import io
import itertools
import json
import math
import operator
import pickle
import random
import re
import statistics
import string
import struct
import textwrap
import traceback
import unicodedata
import weakref
import zoneinfo

print("-- numbers")
decimal.getcontext().prec = 60
print(decimal.Decimal(2).sqrt(), decimal.Decimal(1) / 7)
print(2 ** 500 % 1000007, math.factorial(60), math.pi, math.sin(1e10), float("1e308") * 10)
print(fractions.Fraction(3, 7) + fractions.Fraction(1, 3), statistics.stdev([1, 2, 3, 10]))
random.seed(42)
print(random.random(), random.sample(range(100), 5), random.gauss(0, 1))

print("-- text")
print(re.findall(r"(\w+)@(\w+)\.com", "a@b.com, foo@bar.com"), re.sub(r"\s+", " ", "a  b \n c"))
print(unicodedata.name("é"), "straße".upper(), "ÄÖ".encode("utf-8"), "x".encode("utf-16"))
print(f"{3.14159:10.3f}|{255:#x}|{'mid':^9}|{1e100:g}|{-5:+d}")
print(textwrap.fill("the quick brown fox jumps over the lazy dog", 20))
print(json.dumps({"b": [1, 2.5, None, True], "a": "ü\n"}, sort_keys=True), json.loads('[1e3, "\\u00e9"]'))
out = io.StringIO()
csv.writer(out).writerows([["a", "b,c"], [1, 'say "hi"']])
print(repr(out.getvalue()))

print("-- data")
Point = collections.namedtuple("Point", "x y")
print(Point(1, 2), collections.Counter("mississippi").most_common(2))
print(pickle.loads(pickle.dumps({"k": [Point(1, 2), {3}, b"x"]})))
print(struct.pack("<IhQ", 1, -2, 3).hex(), struct.calcsize("@lqP"), array.array("d", [1.5, 2]).tobytes().hex())
print(heapq.nsmallest(3, [5, 1, 4, 2]), bisect.bisect([1, 3, 5], 4), copy.deepcopy([[1], [2]]))
print(list(itertools.islice(itertools.permutations("abc"), 4)), functools.reduce(operator.mul, range(1, 10)))
print(sorted({"b": 1, "a": 2}.items()), {*"hello"} == set("hello"))

print("-- dates")
moment = datetime.datetime(2024, 2, 29, 12, 34, 56, 789, tzinfo=datetime.timezone.utc)
print(moment.isoformat(), moment + datetime.timedelta(days=366), moment.strftime("%A %j %U %c"))
print(datetime.datetime.fromisoformat("2020-01-01T00:00:00+02:00").timestamp())

print("-- control")


class Colour(enum.Enum):
    RED = 1
    GREEN = enum.auto()


@contextlib.contextmanager
def manager():
    print("enter")
    try:
        yield 5
    finally:
        print("leave")


def generator():
    got = yield 1
    print("got", got)
    yield from range(2)


with manager() as value:
    print(value, Colour.GREEN, list(Colour))
g = generator()
print(next(g), g.send("sent"), list(g))
try:
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise ValueError("outer") from error
except ValueError as error:
    print(error, repr(error.__cause__), len(traceback.format_exc().splitlines()) > 5)


def recurse(n):
    return 0 if n == 0 else 1 + recurse(n - 1)


print(recurse(900))
try:
    recurse(10 ** 6)
except RecursionError as error:
    print("RecursionError")


class Node:
    pass


node = Node()
node.self = node
dead = []
weakref.finalize(node, dead.append, "collected")
del node
gc.collect()
print(dead, ast.literal_eval("{'a': (1, 2)}"), string.Template("$x").substitute(x=1))
print(eval(compile("[i * i for i in range(5)]", "x", "eval")))
match {"kind": "pair", "of": [1, 2]}:
    case {"kind": "pair", "of": [a, b]}:
        print("matched", a, b)
print(sum(len(str(i)) for i in range(200000)))
