"""The micro-batch that one forward and backward pass of the trainer takes, and how rows become one.

Decides which tokens are trained: those an engine sampled with a version that is at most `eta` older than the
one the step starts from. Others stay in their row as context. No advantage is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_agentrl.trajectory.types import NOT_SAMPLED, Segment, Trajectory


@dataclass
class MicroBatch:
    """Rows of token ids with aligned columns. B rows, T tokens; a column value [b, t] belongs to ids_BT[b, t].

    ids_BT     int64, right-padded
    lengths_B  int64, tokens of each row before its padding
    columns    name -> float32 [B, T]; "mask" is 1 where a token is trained, and 0 at t = 0
    """

    ids_BT: torch.Tensor
    lengths_B: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return int(self.columns["mask"].sum())


def rl_micro_batch(rows: Sequence[tuple[Trajectory, float]], pad_id: int, version: int, eta: int) -> MicroBatch:
    """Rows of a reinforcement step: each segment of each trajectory, with its trajectory's advantage.

    Columns: `mask` is 1 iff the token was sampled and 0 <= version - its version <= eta, `behaviour_logprobs`
    the engine's, `advantages` the trajectory's; both 0 where the mask is 0. A segment without a trained token
    is left out.

    Args:
        rows: trajectories and their advantages. Where no trained token comes of them the micro-batch is empty
            ([0, 0]): the step then runs a stand-in of weight 0, so that every rank makes the same passes.
        pad_id: fills rows up to the longest.
        version: the policy version that the step starts from.
        eta: largest allowed staleness.

    Raises:
        ValueError: columns of a segment that differ in length, a sampled first token (nothing predicts it), or
            a trained token whose engine logprob is not finite.
    """
    ids: list[list[int]] = []
    columns: dict[str, list[list[float]]] = {"mask": [], "behaviour_logprobs": [], "advantages": []}
    for trajectory, advantage in rows:
        for index, segment in enumerate(trajectory.segments):
            mask = _trained(segment, version, eta, f"trajectory {trajectory.rollout_id}, segment {index}")
            if any(mask):
                ids.append(segment.token_ids)
                columns["mask"].append(mask)
                columns["behaviour_logprobs"].append(
                    [p if m else 0.0 for p, m in zip(segment.logprobs, mask, strict=True)]
                )
                columns["advantages"].append([advantage * m for m in mask])
    return _micro_batch(ids, columns, pad_id)


def _trained(segment: Segment, version: int, eta: int, what: str) -> list[float]:
    """1.0 for each token of the segment that the step trains."""
    lengths = {len(segment.token_ids), len(segment.loss_mask), len(segment.logprobs), len(segment.versions)}
    if len(lengths) != 1:
        raise ValueError(f"{what}: columns have lengths {sorted(lengths)}, expected one length")
    mask = [
        float(sampled == 1 and stamp != NOT_SAMPLED and 0 <= version - stamp <= eta)
        for sampled, stamp in zip(segment.loss_mask, segment.versions, strict=True)
    ]
    if segment.loss_mask and segment.loss_mask[0]:
        raise ValueError(f"{what}: its first token is marked as sampled, but nothing precedes it")
    for position, (logprob, trained) in enumerate(zip(segment.logprobs, mask, strict=True)):
        if trained and not math.isfinite(logprob):
            raise ValueError(f"{what}: the engine's logprob at token {position} is {logprob}, expected a finite number")
    return mask


def sft_micro_batch(rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int) -> MicroBatch:
    """Rows of a supervised step from (ids, mask) pairs; column `mask`. The first token of a row is never trained:
    nothing predicts it. No rows give an empty micro-batch ([0, 0]). Raises ValueError where ids and mask differ in length."""
    for index, (ids, mask) in enumerate(rows):
        if len(ids) != len(mask):
            raise ValueError(f"row {index} has {len(ids)} ids and {len(mask)} mask values, expected as many")
    masks = [[float(bool(value) and t > 0) for t, value in enumerate(mask)] for _, mask in rows]
    return _micro_batch([list(ids) for ids, _ in rows], {"mask": masks}, pad_id)


def _micro_batch(ids: list[list[int]], columns: dict[str, list[list[float]]], pad_id: int) -> MicroBatch:
    ids_BT = torch.full((len(ids), max(map(len, ids), default=0)), pad_id, dtype=torch.int64)
    for index, row in enumerate(ids):
        ids_BT[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    padded = {}
    for name, values in columns.items():
        padded[name] = torch.zeros(ids_BT.shape, dtype=torch.float32)
        for index, column in enumerate(values):
            padded[name][index, : len(column)] = torch.tensor(column, dtype=torch.float32)
    return MicroBatch(ids_BT, torch.tensor([len(row) for row in ids], dtype=torch.int64), padded)
