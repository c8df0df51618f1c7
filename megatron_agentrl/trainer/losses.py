"""The losses a training step can run: logprobs and a micro-batch in, a sum and its metrics out.

A loss function returns the *sum* over its trained tokens; the step divides by the tokens of the global batch,
so the result does not depend on micro-batches or ranks. Metrics are sums too (divide by `tokens`), except
names that begin with `max/`, which are reduced by maximum. The mathematics is in `algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_agentrl.algorithm.corrections import importance_weights
from megatron_agentrl.algorithm.distillation import distillation_advantages
from megatron_agentrl.algorithm.kl import Estimator, kl
from megatron_agentrl.algorithm.losses import cross_entropy, ppo_clip
from megatron_agentrl.recipe.schema import Algorithm, Proximal
from megatron_agentrl.trainer.batch import MicroBatch

#: (logprobs_BT, micro_batch) -> (loss sum, metrics). logprobs_BT[b, t] belongs to ids_BT[b, t]; column 0 is unused.
LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def rl_loss(algorithm: Algorithm) -> LossFunction:
    """Clipped policy-gradient loss of the recipe, plus kl_coef times the k3 KL to the reference policy, minus
    entropy_coef times the policy's entropy. With teacher_coef > 0 each token's advantage gains that much of
    `distillation_advantages`.

    Columns read: `mask`, `advantages`, `behaviour_logprobs`; `old` (the trainer's own logprobs at the start of the
    step) with `proximal=recomputed`, where its absence means that the present logprobs are those; `reference`
    with kl_coef > 0, `teacher` with teacher_coef > 0; `entropy` (the step's own, differentiable) where it is there.

    Metrics: `tokens`, `logprob_gap` and `max/logprob_gap` (|trainer - engine|), `clipped`, `clamped`, `ratio`;
    with `proximal=recomputed` also `importance_weight` and `importance_outside`; with kl_coef > 0 `kl`; with
    teacher_coef > 0 `teacher_kl` (k1: may be negative); with the column `entropy`.

    Raises:
        ValueError: bounds of the recipe that exclude each other.
        KeyError: a coefficient above 0 without its column `reference`, `teacher` or `entropy` (when the loss is called).
    """
    _check(algorithm)

    def loss(logprobs_BT: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        columns = micro_batch.columns
        mask_BT = columns["mask"].bool()
        behaviour_BT = columns["behaviour_logprobs"]
        metrics: dict[str, torch.Tensor] = {}
        weights_BT = None
        old_BT = behaviour_BT
        if algorithm.proximal is Proximal.recomputed:
            old_BT = columns["old"] if "old" in columns else logprobs_BT.detach()
            weights_BT, outside_BT = importance_weights(
                algorithm.correction,
                old_BT,
                behaviour_BT,
                mask_BT,
                cap=algorithm.importance_cap,
                floor=algorithm.importance_floor,
            )
            metrics["importance_weight"] = weights_BT.sum()
            metrics["importance_outside"] = outside_BT.sum()
        advantages_BT = columns["advantages"]
        if algorithm.teacher_coef > 0:
            gain_BT = distillation_advantages(logprobs_BT, columns["teacher"], mask_BT)
            advantages_BT = advantages_BT + algorithm.teacher_coef * gain_BT
            metrics["teacher_kl"] = -gain_BT.sum()
        policy = ppo_clip(
            logprobs_BT,
            old_BT,
            advantages_BT,
            mask_BT,
            algorithm.clip_low,
            algorithm.clip_high,
            weights=weights_BT,
            dual_clip=algorithm.dual_clip,
        )
        total = policy.loss.sum()
        if algorithm.kl_coef > 0:
            divergence_BT = kl(Estimator.k3, logprobs_BT, columns["reference"], mask_BT)
            total = total + algorithm.kl_coef * divergence_BT.sum()
            metrics["kl"] = divergence_BT.detach().sum()
        if "entropy" in columns or algorithm.entropy_coef > 0:
            entropy = torch.where(mask_BT, columns["entropy"], 0.0).sum()
            if algorithm.entropy_coef > 0:
                total = total - algorithm.entropy_coef * entropy
            metrics["entropy"] = entropy
        with torch.no_grad():
            gap_BT = torch.where(mask_BT, (logprobs_BT - behaviour_BT).abs(), torch.zeros_like(logprobs_BT))
            metrics |= {
                "tokens": mask_BT.sum(),
                "logprob_gap": gap_BT.sum(),
                "max/logprob_gap": gap_BT.max(),
                "ratio": policy.ratio.sum(),
                "clipped": policy.clipped.sum(),
                "clamped": policy.clamped.sum(),
            }
        return total, {name: value.detach().float() for name, value in metrics.items()}

    return loss


def _check(algorithm: Algorithm) -> None:
    floor, cap = algorithm.importance_floor, algorithm.importance_cap
    if not 0 <= floor <= cap or cap <= 0:
        raise ValueError(
            f"algorithm.importance_floor={floor} and importance_cap={cap}: expected 0 <= floor <= cap, cap > 0"
        )
    if not 0 <= algorithm.clip_low <= 1 or algorithm.clip_high < 0:
        raise ValueError(
            f"algorithm.clip_low={algorithm.clip_low} and clip_high={algorithm.clip_high}: "
            "expected clip_low in [0, 1] and clip_high >= 0"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        raise ValueError(f"algorithm.dual_clip={algorithm.dual_clip}: expected a number above 1, or null")


def sft_loss(logprobs_BT: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy over the trained tokens. Metrics: `tokens`, `cross_entropy`."""
    mask_BT = micro_batch.columns["mask"].bool()
    total = cross_entropy(logprobs_BT, mask_BT).sum()
    return total, {"tokens": mask_BT.sum().float(), "cross_entropy": total.detach().float()}
