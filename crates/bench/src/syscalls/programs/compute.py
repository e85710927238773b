# Floating point, containers and strings, without a system call in between.
import time

def work(n):
    total, words = 0.0, {}
    for i in range(n):
        total += (i * i % 7) ** 0.5
        key = str(i % 1000)
        words[key] = words.get(key, 0) + 1
    return total + sum(words.values())

work(100_000)
begin = time.perf_counter()
work(1_500_000)
print((time.perf_counter() - begin) * 1e3)
