"""What was sampled, token by token: Segment, Trajectory, and the Receipt that stands for one.

A *segment* is one row of token ids in which every sampled token's preceding ids are exactly the ids
the engine was given. A *trajectory* is one run of an agent: one or more segments and an outcome.
A *receipt* is what the coordinator handles in a trajectory's place: it says how long, how good, how
old and where, and holds no tokens.

All three are msgspec structs: immutable in spirit, cheap to encode, no behaviour beyond derivation.
"""

from __future__ import annotations

import msgspec

#: Version stamp of a token that no engine sampled (prompt, template or tool tokens).
NOT_SAMPLED = -1

#: Ways a trajectory can end. Only `ok` and `over_length` carry a reward that may be trained on;
#: the others are failures of a kind, never a reward of 0.
STATUSES = ("ok", "over_length", "agent_error", "environment_error", "timeout", "engine_error")


class Segment(msgspec.Struct):
    """One training row. All columns have the same length T.

    token_ids_T    ids as given to and returned by the engine
    loss_mask_T    1 where the token was sampled by an engine of this run
    logprobs_T     the engine's logprob of a sampled token (0.0 elsewhere)
    versions_T     policy version that sampled the token (NOT_SAMPLED elsewhere)
    turns          [start, stop) of each sampled turn
    finish_reasons one per turn: stop, length
    split_reason   why a new segment began (None for the first)
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    turns: list[tuple[int, int]] = msgspec.field(default_factory=list)
    finish_reasons: list[str] = msgspec.field(default_factory=list)
    split_reason: str | None = None


class Trajectory(msgspec.Struct):
    """One agent run. `task_id` names the group: trajectories of one group answer one prompt."""

    rollout_id: str
    task_id: str
    sample: int
    segments: list[Segment]
    status: str
    reward: float | None
    engine: str
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Where(msgspec.Struct):
    """Place of a payload: spool file relative to the run folder, byte offset and length, CRC-32 of the bytes."""

    file: str
    offset: int
    length: int
    crc32: int


class Receipt(msgspec.Struct):
    """Stands for a trajectory at the coordinator. `sampled` counts sampled tokens per policy version."""

    rollout_id: str
    task_id: str
    sample: int
    status: str
    reward: float | None
    engine: str
    lengths: list[int]
    sampled: dict[int, int]
    where: Where | None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    message: str = ""
