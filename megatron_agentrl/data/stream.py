"""The prompt stream: position -> (epoch, prompt), a pure function of the seed.

There is no iterator state to save. Where a run stands is a number (or a set of numbers, while work is in
flight), and the ledger keeps it.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import NamedTuple


class Position(NamedTuple):
    """Place in the stream: pass over the prompts, and index into them."""

    epoch: int
    prompt: int


class Stream:
    """`size` prompts, shuffled anew each epoch when `shuffle`; endless when `epochs` is None."""

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True, epochs: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"a stream needs at least 1 prompt, found {size}")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.total = None if epochs is None else size * epochs

    def at(self, position: int) -> Position:
        """The prompt at `position` >= 0; IndexError past the end."""
        if position < 0 or (self.total is not None and position >= self.total):
            raise IndexError(f"position {position} is outside the stream of {self.total} prompts")
        epoch, index = divmod(position, self.size)
        return Position(epoch, permutation(self.size, self.seed, epoch)[index] if self.shuffle else index)


@lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A shuffle of range(size) for one epoch.

    Sorted by random keys: `random.random` is the one draw whose sequence Python promises to keep across versions.
    """
    draw = random.Random(f"{seed}/{epoch}").random
    keys = [draw() for _ in range(size)]
    return tuple(sorted(range(size), key=keys.__getitem__))
