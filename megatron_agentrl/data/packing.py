"""How many input positions rows take when they share one row of tokens, and which of them share one.

Plain numbers: lengths in, positions and groups out. The coordinator plans micro-batches with this and the trainer lays
them out (`trainer.sequence_layout`), so both count alike. No tokens and no torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_agentrl.recipe.schema import Topology


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Multiples:
    """The padding that parallel sizes need, and none beyond it.

    sequence   each sequence is cut into this many equal chunks (2 * cp: every context-parallel rank takes an early
               and a late one), so its positions are a multiple of it
    row        positions of the whole row: each context-parallel rank's share is cut once more over the
               tensor-parallel ranks where activations are sharded along the sequence
    """

    sequence: int = 1
    row: int = 1

    def positions(self, lengths: Iterable[int]) -> int:
        """Input positions of rows with these many tokens, one after another.

        A row's last token predicts nothing and is no input, so a row of n tokens takes n - 1 positions before padding.
        """
        return _up(sum(_up(max(0, length - 1), self.sequence) for length in lengths), self.row)


def multiples(tp: int = 1, cp: int = 1, sequence_parallel: bool = False) -> Multiples:
    """The multiples that tensor-parallel and context-parallel sizes ask for."""
    sequence = 2 * cp if cp > 1 else 1
    return Multiples(sequence, math.lcm(sequence, cp * (tp if sequence_parallel else 1)))


def multiples_of(topology: Topology) -> Multiples:
    """`multiples` of a recipe's topology."""
    return multiples(topology.tp, topology.cp, topology.sequence_parallel)


def first_fit(sizes: Sequence[Sequence[int]], bound: int, multiples: Multiples) -> list[list[int]]:
    """Groups of indices, each of at most `bound` positions: largest first, each into the first group with room.

    Args:
        sizes: the row lengths of each item; an item is never split. One that exceeds the bound alone has a group of
            its own.
        bound: positions a group may take.

    Returns:
        Groups in the order they were opened; the same for the same sizes, whatever called it.
    """
    alone = [multiples.positions(lengths) for lengths in sizes]
    groups: list[list[int]] = []
    taken: list[int] = []  # positions before the row's own padding; sequences add up
    for index in sorted(range(len(sizes)), key=lambda index: (-alone[index], index)):
        own = Multiples(multiples.sequence).positions(sizes[index])
        for group, used in enumerate(taken):
            if _up(used + own, multiples.row) <= bound:
                groups[group].append(index)
                taken[group] += own
                break
        else:
            groups.append([index])
            taken.append(own)
    return groups
