"""Importance weights for tokens that another policy sampled: w = exp(log pi_trainer - log pi_engine).

`truncate`  w is brought into [floor, cap]
`mask`      tokens with w outside [floor, cap] are left out (weight 0)

The decision is made on the log ratio, before exponentiating: a token that is 95 nats away gives the cap or 0,
never an overflow. Weights are constants (no gradient). A NaN stays NaN: it must be seen, not clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_agentrl.recipe.schema import Correction


class Weights(NamedTuple):
    """What `importance_weights` gives, per token.

    weights  0 where the loss mask is 0
    outside  bool: trained tokens whose weight was outside [floor, cap]
    """

    weights: torch.Tensor
    outside: torch.Tensor


def importance_weights(
    kind: Correction,
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    mask: torch.Tensor,
    cap: float,
    floor: float = 0.0,
) -> Weights:
    """Token-level importance weights, shapes [..., T] alike.

    Args:
        logprobs: of the trainer's policy at the start of the step.
        behaviour_logprobs: of the engine at the version that sampled the token.
        mask: True (or nonzero) where a token is trained.
        cap, floor: bounds of the weight, 0 <= floor <= cap, cap > 0.
    """
    mask = mask.bool()
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    log_weight = torch.where(mask, (logprobs - behaviour_logprobs).detach(), zero)
    low = math.log(floor) if floor > 0 else -math.inf
    high = math.log(cap)
    above, below = mask & (log_weight > high), mask & (log_weight < low)
    weight = torch.where(above | below, zero, log_weight).exp()
    weight = CORRECTIONS[kind](weight, above, below, cap, floor)
    return Weights(torch.where(mask, weight, zero), above | below)


def _truncate(weight: torch.Tensor, above: torch.Tensor, below: torch.Tensor, cap: float, floor: float) -> torch.Tensor:
    return weight.masked_fill(above, cap).masked_fill(below, floor)


def _mask(weight: torch.Tensor, above: torch.Tensor, below: torch.Tensor, cap: float, floor: float) -> torch.Tensor:
    return weight.masked_fill(above | below, 0.0)


CORRECTIONS: dict[Correction, Callable[..., torch.Tensor]] = {Correction.truncate: _truncate, Correction.mask: _mask}
