"""Intervals of whole numbers, each a pair of its first and its last number."""


def merge(intervals):
    """The same numbers in as few intervals as possible, in order."""
    merged = []
    for first, last in intervals:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def total(intervals):
    """How many numbers there are; one that is in several intervals counts once."""
    return sum(last - first for first, last in intervals)


def without(intervals, hole):
    """All numbers but those of one interval."""
    start, end = hole
    kept = []
    for first, last in merge(intervals):
        if first < start:
            kept.append((first, min(last, start - 1)))
        if last > end:
            kept.append((max(first, end + 1), last))
    return kept
