"""Per-token estimates of KL(pi || reference) from tokens that pi sampled.

With d = log pi - log reference at the sampled token:
`k1` = d, unbiased, of either sign · `k2` = d^2 / 2, biased, never negative · `k3` = e^-d - 1 + d, unbiased
and never negative. The direction matters: swapping the arguments estimates another divergence.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch

#: |d| beyond this is clamped before exponentiating.
MAX_LOG_RATIO = 20.0


class Estimator(str, Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


def kl(kind: Estimator, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(pi || reference) per trained token, 0 elsewhere; shapes [..., T] alike. Gradient flows to `logprobs`."""
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    d = torch.where(mask.bool(), logprobs - reference_logprobs, zero)
    return ESTIMATORS[kind](d)


def _k3(d: torch.Tensor) -> torch.Tensor:
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-d) + d


ESTIMATORS: dict[Estimator, Callable[[torch.Tensor], torch.Tensor]] = {
    Estimator.k1: lambda d: d,
    Estimator.k2: lambda d: d * d / 2,
    Estimator.k3: _k3,
}
