"""Group-relative advantages: from the rewards of one prompt's trajectories to one number each.

`rloo`  reward minus the mean of the others
`grpo`  reward minus the mean, over the sample standard deviation (n - 1), without an epsilon
`mean`  reward minus the mean
`zero`  0: the reward teaches nothing

A group whose rewards are equal, or in which one or no member is left, has no signal: its advantages are
exactly 0. Equal means within 1e-6 of the largest magnitude: a difference that small is rounding in the
reward's own arithmetic, and dividing by its spread would make unit-sized noise of it. Computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron_agentrl.recipe.schema import Advantage

#: Spread of a group's rewards, relative to the largest magnitude, below which they count as equal.
EQUAL = 1e-6


def has_signal(rewards: Sequence[float | None]) -> bool:
    """False where a group can teach nothing: fewer than two members with a reward, or equal rewards."""
    present = [reward for reward in rewards if reward is not None]
    if len(present) < 2:
        return False
    return max(present) - min(present) > EQUAL * max(abs(reward) for reward in present)


def group_advantages(kind: Advantage, rewards: Sequence[float | None]) -> list[float]:
    """Advantage of each member of one group.

    Args:
        rewards: one per member; None for a member that is missing (failed or dropped). Statistics are those of
            the members present; a missing member's advantage is 0.

    Raises:
        ValueError: a reward is not finite.
    """
    present = [float(reward) for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in present):
        raise ValueError(f"rewards {list(rewards)} are not all finite; a reward must be a number")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    values = iter(ESTIMATORS[kind](present))
    return [0.0 if reward is None else next(values) for reward in rewards]


def _centred(rewards: list[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _rloo(rewards: list[float]) -> list[float]:
    n = len(rewards)
    return [centred * n / (n - 1) for centred in _centred(rewards)]


def _grpo(rewards: list[float]) -> list[float]:
    scale = max(abs(reward) for reward in rewards)  # squares of the raw rewards could overflow
    centred = _centred([reward / scale for reward in rewards])
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / std for value in centred]


ESTIMATORS: dict[Advantage, Callable[[list[float]], list[float]]] = {
    Advantage.rloo: _rloo,
    Advantage.grpo: _grpo,
    Advantage.mean: _centred,
    Advantage.zero: lambda rewards: [0.0] * len(rewards),
}
