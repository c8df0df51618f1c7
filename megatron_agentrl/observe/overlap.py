"""Interval arithmetic over spans: how much of the time of one activity another was going on.

Asynchrony is worth what it overlaps: `overlap(training spans, generation spans)` is the share of training time
during which tokens were being sampled.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same points. Empty and reversed ones are left out."""
    merged: list[Interval] = []
    for start, stop in sorted((a, b) for a, b in intervals if b > a):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Total length of the union, in the intervals' unit."""
    return sum(stop - start for start, stop in union(intervals))


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the points of both unions."""
    left, right = union(a), union(b)
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            found.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Share of the union of `a` that the union of `b` covers, in [0, 1]; 0.0 where `a` has no length."""
    a = list(a)
    total = length(a)
    return length(intersection(a, b)) / total if total else 0.0
