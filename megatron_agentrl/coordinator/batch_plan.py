"""The batch plan: which trajectories a step trains on, on which data-parallel rank, in which micro-batch.

One pure function of the receipts. It reads no clock, no randomness and no order of arrival, so the same receipts
give the same plan anywhere. It never sees a token: lengths and versions per trajectory are enough.

Rules:
* Oldest-admitted groups go first. A group in which no trajectory has a trainable token left is stale and drops out.
* A token is trainable when an engine sampled it and 0 <= step - version <= eta. Older tokens stay as context.
* A trajectory is one row of the plan and is never split, whatever its number of segments. Alone it takes
  `segments x longest segment` padded tokens; where the trainer packs, the input positions of its segments. One that
  exceeds the bound alone gets a micro-batch of its own.
* A row without a trainable token is left out of the micro-batches; so is one whose group has equal rewards, unless
  something other than the advantage makes its gradient non-zero. Its reward still counts in its group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from megatron_agentrl.coordinator.rows import metric_means
from megatron_agentrl.data.packing import Multiples, first_fit
from megatron_agentrl.trajectory.types import Receipt


class Row(msgspec.Struct):
    """A trajectory in a micro-batch: `plan.groups[group].rewards[member]` is its reward."""

    receipt: Receipt
    group: int
    member: int


class GroupRewards(msgspec.Struct):
    """Rewards of a group's survivors, in order of their sample index."""

    task_id: str
    rewards: list[float]


class Plan(msgspec.Struct):
    """What one step trains on. See docs/architecture.md ("Plan")."""

    step: int
    version: int
    ranks: list[list[list[Row]]]
    """Data-parallel rank -> micro-batch -> rows; each rank has the same number of micro-batches."""
    tokens: int
    """Trainable tokens of all groups, rows left out of the micro-batches included."""
    groups: list[GroupRewards]
    padding: float
    """Share of the padded tokens that hold nothing."""
    skipped: int
    """Rows left out because they add exactly nothing."""
    stats: dict[str, float] = msgspec.field(default_factory=dict)
    """Numbers for the step's metrics: staleness, masked tokens, what is trained against what was admitted, and the
    means of what the agents reported (`agent/NAME`)."""


@dataclass(frozen=True)
class Candidate:
    """A complete group: its place in the order of admission, and the receipts of its survivors."""

    order: int
    task_id: str
    receipts: Sequence[Receipt]


@dataclass(frozen=True)
class Selection:
    """The groups a step takes, oldest first, and the ids of those that are too old to be trained at all."""

    chosen: list[Candidate]
    stale: list[str]


@dataclass(frozen=True)
class Shape:
    """What the trainer can take: `ranks` data-parallel ranks, micro-batches of at most `micro_batch_tokens` padded
    tokens, their number on each rank a multiple of `multiple` (an interleaved pipeline needs its stage count).
    `packing` holds the padding of packed rows; None where each segment is padded to the longest."""

    ranks: int
    micro_batch_tokens: int
    multiple: int = 1
    packing: Multiples | None = None


@dataclass
class _MicroBatch:
    rows: list[Row]
    packing: Multiples | None = None
    segments: int = 0
    longest: int = 0

    @property
    def padded(self) -> int:
        if self.packing is not None:
            return self.packing.positions(length for row in self.rows for length in row.receipt.lengths)
        return self.segments * self.longest

    def padded_with(self, row: Row) -> int:
        return (self.segments + len(row.receipt.lengths)) * max(self.longest, _longest(row))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.segments += len(row.receipt.lengths)
        self.longest = max(self.longest, _longest(row))


def staleness(sampled: dict[int, int], step: int) -> dict[int, int]:
    """Staleness -> number of sampled tokens, for a step that starts from version `step`."""
    return {step - version: count for version, count in sampled.items()}


def trainable_tokens(sampled: dict[int, int], step: int, eta: int) -> int:
    """Sampled tokens whose staleness is within 0 .. eta."""
    return sum(count for age, count in staleness(sampled, step).items() if 0 <= age <= eta)


def select(candidates: Iterable[Candidate], step: int, eta: int, batch: int) -> Selection:
    """The `batch` oldest groups that hold a trainable token (fewer when there are not enough), and every stale one."""
    chosen: list[Candidate] = []
    stale: list[str] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.order):
        if not any(trainable_tokens(receipt.sampled, step, eta) for receipt in candidate.receipts):
            stale.append(candidate.task_id)
        elif len(chosen) < batch:
            chosen.append(candidate)
    return Selection(chosen, stale)


def plan_batch(chosen: Sequence[Candidate], step: int, eta: int, shape: Shape, keep_equal: bool = False) -> Plan:
    """The plan of `step` over `chosen`, whose order does not matter.

    `keep_equal` keeps the rows of groups with equal rewards in the micro-batches (a KL term or permuted rewards give
    them a gradient). Every receipt needs a reward; ValueError otherwise.
    """
    groups: list[GroupRewards] = []
    rows: list[Row] = []
    receipts: list[Receipt] = []
    for candidate in sorted(chosen, key=lambda candidate: candidate.order):
        members = sorted(candidate.receipts, key=lambda receipt: receipt.sample)
        rewards = [_reward(receipt) for receipt in members]
        equal = len(set(rewards)) <= 1 and not keep_equal
        for member, receipt in enumerate(members):
            if not equal and trainable_tokens(receipt.sampled, step, eta):
                rows.append(Row(receipt, len(groups), member))
        receipts.extend(members)
        groups.append(GroupRewards(candidate.task_id, rewards))
    packed = [_pack(share, shape.micro_batch_tokens, shape.packing) for share in _share_out(rows, shape.ranks)]
    count = max(1, *(len(micro_batches) for micro_batches in packed))
    count = -(-count // shape.multiple) * shape.multiple
    for micro_batches in packed:
        _even_up(micro_batches, count)
    padded = sum(micro_batch.padded for micro_batches in packed for micro_batch in micro_batches)
    held = sum(_held(row, shape.packing) for row in rows)
    return Plan(
        step=step,
        version=step,
        ranks=[[micro_batch.rows for micro_batch in micro_batches] for micro_batches in packed],
        tokens=sum(trainable_tokens(receipt.sampled, step, eta) for receipt in receipts),
        groups=groups,
        padding=1 - held / padded if padded else 0.0,
        skipped=len(receipts) - len(rows),
        stats=_stats(receipts, rows, step, eta),
    )


def _share_out(rows: Iterable[Row], ranks: int) -> list[list[Row]]:
    """Rows to ranks, longest first, each to the rank with the least tokens (then the fewest rows) so far."""
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for row in sorted(rows, key=lambda row: (-sum(row.receipt.lengths), row.group, row.member)):
        rank = min(range(ranks), key=lambda rank: (load[rank], len(shares[rank]), rank))
        shares[rank].append(row)
        load[rank] += sum(row.receipt.lengths)
    return shares


def _pack(rows: Sequence[Row], bound: int, packing: Multiples | None) -> list[_MicroBatch]:
    """Rows to micro-batches of at most `bound` padded tokens. Padded rows: neighbours in length share one, so little is
    padded. Packed rows: largest first, each where there is room, so that few micro-batches are left half empty."""
    if packing is not None:
        rows = sorted(rows, key=lambda row: (row.group, row.member))
        return [
            _micro_batch([rows[index] for index in indices], packing)
            for indices in first_fit([row.receipt.lengths for row in rows], bound, packing)
        ]
    micro_batches: list[_MicroBatch] = []
    for row in sorted(rows, key=lambda row: (-_longest(row), row.group, row.member)):
        if not micro_batches or micro_batches[-1].padded_with(row) > bound:
            micro_batches.append(_MicroBatch([]))
        micro_batches[-1].add(row)
    return micro_batches


def _even_up(micro_batches: list[_MicroBatch], count: int) -> None:
    """Brings a rank to `count` micro-batches by halving its largest; empty ones only where nothing can be halved.

    Largest first afterwards: ranks that run in lockstep (expert parallelism) then meet micro-batches of like size.
    """
    while len(micro_batches) < count:
        largest = max(
            (index for index, micro_batch in enumerate(micro_batches) if len(micro_batch.rows) > 1),
            key=lambda index: micro_batches[index].padded,
            default=None,
        )
        if largest is None:
            micro_batches.append(_MicroBatch([]))
            continue
        taken = micro_batches.pop(largest)
        whole, packing = taken.rows, taken.packing
        middle = len(whole) // 2
        for rows in (whole[:middle], whole[middle:]):
            micro_batches.append(_micro_batch(rows, packing))
    micro_batches.sort(key=lambda micro_batch: -micro_batch.padded)


def _stats(receipts: Sequence[Receipt], rows: Sequence[Row], step: int, eta: int) -> dict[str, float]:
    ages: Counter[int] = Counter()
    for receipt in receipts:
        ages.update(staleness(receipt.sampled, step))
    trained = {age: count for age, count in ages.items() if 0 <= age <= eta and count}
    tokens = sum(trained.values())
    sampled = sum(ages.values())
    return {
        "staleness_mean": sum(age * count for age, count in trained.items()) / tokens if tokens else 0.0,
        "staleness_max": float(max(trained, default=0)),
        "tokens_sampled": float(sampled),
        "masked_tokens": float(sampled - tokens),
        "sampled_tokens_mean": sampled / len(receipts) if receipts else 0.0,
        "trained_tokens_mean": tokens / len(receipts) if receipts else 0.0,
        "reward_mean": sum(_reward(receipt) for receipt in receipts) / len(receipts) if receipts else 0.0,
        "rows": float(len(rows)),
        **{f"agent/{name}": mean for name, mean in metric_means(receipts).items()},
    }


def _micro_batch(rows: Iterable[Row], packing: Multiples | None) -> _MicroBatch:
    made = _MicroBatch([], packing)
    for row in rows:
        made.add(row)
    return made


def _held(row: Row, packing: Multiples | None) -> int:
    """What the row holds of the tokens that `_MicroBatch.padded` counts: a packed segment's last token is no input."""
    return sum(row.receipt.lengths) if packing is None else sum(length - 1 for length in row.receipt.lengths)


def _longest(row: Row) -> int:
    return max(row.receipt.lengths, default=0)


def _reward(receipt: Receipt) -> float:
    if receipt.reward is None:
        raise ValueError(
            f"{receipt.task_id}/{receipt.sample} has no reward (status {receipt.status}); failed trajectories are "
            f"not planned"
        )
    return receipt.reward
