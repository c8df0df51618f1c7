"""Canary sequences: the fixed token rows that prove what an engine computes with.

After each install an engine scores them and must agree with the trainer to within the recipe's tolerance.
They are random ids, so that every expert and every vocabulary region is visited, and *decisive*: where a
router's k-th and (k+1)-th score are closer than fp32 noise, two correct implementations may pick different
experts, and a disagreement would say nothing about the weights. Such rows are passed over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_attr_wrapped_model

from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.step import forward_logprobs

#: Smallest accepted distance between the last chosen and the first rejected router score (scores lie in [0, 1]).
#: A hundred times the fp32 noise seen between implementations.
DECISIVE = 1e-5


@dataclass(frozen=True)
class CanaryRow:
    """ids[t] was given logprob logprobs[t] by the trainer; position 0 has none and holds 0.0."""

    ids: list[int]
    logprobs: list[float]


def candidates(vocabulary: int, length: int, count: int, seed: int) -> torch.Tensor:
    """ids_BT [count, length], uniform over the vocabulary; the same on every rank."""
    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def router_margins(models: list[Any], rows: int) -> Iterator[torch.Tensor]:
    """Yields margin_B, filled during the forwards inside: per row the smallest top-k margin over layers and positions.

    Only those of this rank: a pipeline stage routes in its own layers, a sequence-parallel rank its own positions.
    """
    margin_B = torch.full((rows,), float("inf"))

    def watch(router: TopKRouter, inputs: tuple, _outputs: object) -> None:
        hidden_SBH = inputs[0].float()
        logits_SBE = hidden_SBH @ router.weight.float().t()
        score_SBE = logits_SBE.sigmoid() if router.score_function == "sigmoid" else logits_SBE.softmax(-1)
        if router.expert_bias is not None:
            score_SBE = score_SBE + router.expert_bias
        if router.topk >= score_SBE.shape[-1]:
            return
        best = score_SBE.topk(router.topk + 1, dim=-1).values
        gap_B = (best[..., -2] - best[..., -1]).amin(dim=0).cpu()
        if gap_B.shape != margin_B.shape:
            return  # an empty micro-batch that fills up the interleaved schedule
        margin_B.copy_(torch.minimum(margin_B, gap_B))

    handles = [m.register_forward_hook(watch) for chunk in models for m in chunk.modules() if isinstance(m, TopKRouter)]
    try:
        yield margin_B
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def score(models: list[Any], vocabulary: int, length: int, seed: int, rows: int = 2) -> list[CanaryRow]:
    """The trainer's own scores of `rows` decisive canary rows. Collective: every rank calls it with the same arguments."""
    count = 4 * rows
    ids_BT = candidates(vocabulary, length, count, seed)
    batch = MicroBatch(
        ids_BT=ids_BT, lengths_B=torch.full((count,), length), columns={"mask": torch.ones(count, length)}
    )
    with router_margins(models, count) as margin_B:
        # Unpacked, so that a row's positions are its own in the router's input.
        logprobs_BT = forward_logprobs(models, [batch], temperature=1.0, packing=False)[0].cpu()
    if dist.get_world_size() > 1:  # a rank sees the positions and layers that it holds
        margins = margin_B.to(next(models[0].parameters()).device)
        dist.all_reduce(margins, dist.ReduceOp.MIN)
        margin_B = margins.cpu()
    if get_attr_wrapped_model(models[0], "packing"):  # the scores come by the path that trains
        logprobs_BT = forward_logprobs(models, [batch], temperature=1.0)[0].cpu()
    # The most decisive rows, in a stable order; all rows qualify where nothing is routed.
    chosen = sorted(range(count), key=lambda b: (margin_B[b].item() < DECISIVE, b))[:rows]
    return [CanaryRow(ids_BT[b].tolist(), logprobs_BT[b].tolist()) for b in chosen]
