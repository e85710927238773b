"""Float operation: sines, cosines and square roots."""

import math


def run(n=200_000):
    total = 0.0
    for i in range(n):
        total += math.sin(i) + math.cos(i) + math.sqrt(i)
    return round(total, 6)
