"""What the ledger keeps account of: groups and their samples, and the balance over them.

group   in_flight ─► complete ─► planned ─► trained        (resume: trained ─► planned)
             ├────► failed          no sample survived
             └────► dropped         too few survived, or (from complete) too old: "stale"
sample  queued ─► asked ─► done                            (given back: asked, held ─► queued)
                    ├────► held ─► done                    its policy version is not proven yet
                    └────► failed                          retries used up
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_agentrl.trajectory.types import Receipt

Kind = Literal["train", "eval"]
GroupState = Literal["in_flight", "complete", "planned", "trained", "dropped", "failed"]
SampleState = Literal["queued", "asked", "held", "done", "failed"]

#: Reason of a drop after which the prompt is asked again.
STALE = "stale"
#: Reason of a drop for which too few samples survived.
TOO_FEW = "too_few_survivors"


class LedgerError(RuntimeError):
    """The ledger does not add up, or was asked for a transition that cannot be."""


class Failure(NamedTuple):
    """One failed attempt at a sample."""

    rollout_id: str
    status: str
    message: str


@dataclass(slots=True)
class Sample:
    """One trajectory of a group: where it stands, and its receipt once there is one."""

    index: int
    state: SampleState = "queued"
    asked: int = 0
    """Times it was handed to a worker."""
    worker: str = ""
    since: float = 0.0
    """When it was handed out or held, by the ledger's clock; means nothing after a restart and is not stored."""
    failures: list[Failure] = field(default_factory=list)
    receipt: Receipt | None = None

    @property
    def final(self) -> bool:
        return self.state in ("done", "failed")


@dataclass(slots=True)
class Group:
    """One prompt under way. `order` is its place in the order of admission; `round` counts how often its stream
    position was admitted before (a stale group's prompt is asked again as a new group)."""

    task_id: str
    kind: Kind
    order: int
    prompt: int
    samples: list[Sample]
    position: int | None = None
    round: int = 0
    eval_id: str | None = None
    state: GroupState = "in_flight"
    reason: str = ""
    step: int | None = None

    @property
    def final(self) -> bool:
        """Whether every sample has its outcome."""
        return all(sample.final for sample in self.samples)

    @property
    def receipts(self) -> list[Receipt]:
        """Receipts of the survivors, by sample index."""
        return [sample.receipt for sample in self.samples if sample.state == "done" and sample.receipt is not None]


class Balance(NamedTuple):
    """Groups of the training stream: admitted = trained + dropped + failed + buffered + running.

    `returned` of the dropped ones wait to be asked again; `untouched` prompts were never admitted (None: endless).
    """

    admitted: int
    trained: int
    dropped: int
    failed: int
    buffered: int
    running: int
    returned: int
    untouched: int | None


def task_name(position: int, round: int) -> str:
    """Task id of a stream position: `t000012`, and `t000012.1` when it is asked anew after a stale drop."""
    return f"t{position:06d}" + (f".{round}" if round else "")


def metric_means(receipts: Iterable[Receipt]) -> dict[str, float]:
    """Mean of each number that agents reported, over the runs that report it."""
    values: dict[str, list[float]] = {}
    for receipt in receipts:
        for name, value in receipt.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
