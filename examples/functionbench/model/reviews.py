"""Makes reviews with known moods, to train on and to judge."""

import random

GOOD = "great tasty fresh lovely perfect excellent delicious cheap quick friendly".split()
BAD = "awful stale broken late bitter poor expensive slow rude wrong".split()
NEUTRAL = "the coffee tea box order shop it was a very and with my of biscuit arrived".split()


def make(count, seed):
    """Texts, and for each 1 if its mood is good, else 0."""
    source = random.Random(seed)
    texts, moods = [], []
    for _ in range(count):
        mood = source.randrange(2)
        likely, unlikely = (GOOD, BAD) if mood else (BAD, GOOD)
        words = source.choices(NEUTRAL, k=12) + source.choices(likely, k=3) + source.choices(unlikely, k=1)
        source.shuffle(words)
        texts.append(" ".join(words))
        moods.append(mood)
    return texts, moods
