"""Policy losses per token. Shapes: [..., T], all arguments alike; the caller reduces (see `reduce`).

Masked tokens are selected away before anything is exponentiated, never multiplied by 0: an unused token may
hold any value, infinite or filler, and adds neither loss nor gradient. A NaN at a trained token stays NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: |log ratio| beyond this is clamped, so that float32's exp neither overflows nor meets 0 * inf.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """What `ppo_clip` gives, per token.

    loss     0 where masked
    ratio    the ratio the loss was computed with, a constant; 0 where masked
    clipped  bool: the clipped term is the larger one, so that the token has no gradient
    clamped  bool: the log ratio was beyond MAX_LOG_RATIO
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    clamped: torch.Tensor


def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    weights: torch.Tensor | None = None,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate with separate bounds: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    Args:
        logprobs: of the policy that is trained; the only argument that gets a gradient.
        old_logprobs: of the proximal policy; r = exp(logprobs - old_logprobs).
        mask: True (or nonzero) where a token is trained.
        weights: importance weight of each token's loss (see `corrections`); a constant.
        dual_clip: upper bound of a negative-advantage token's loss, in units of |A| (above 1); None for none.
    """
    mask = mask.bool()
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    advantages = torch.where(mask, advantages, zero)
    raw = torch.where(mask, logprobs - old_logprobs, zero)
    ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = mask & (bounded > plain)
    if dual_clip is not None:
        ceiling = dual_clip * advantages.abs()
        above = (advantages < 0) & (loss > ceiling)
        loss = torch.where(above, ceiling, loss)
        clipped = clipped | (mask & above)
    if weights is not None:
        loss = loss * torch.where(mask, weights.detach(), zero)
    return PolicyLoss(loss, torch.where(mask, ratio.detach(), zero), clipped, mask & (raw.abs() > MAX_LOG_RATIO))


def cross_entropy(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-logprob per trained token, 0 elsewhere."""
    return torch.where(mask.bool(), -logprobs, torch.zeros((), dtype=logprobs.dtype, device=logprobs.device))
