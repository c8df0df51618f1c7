"""What one topology and layout computes for a toy model: the same function for the reference and for the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import trainer_toy as toy

from megatron_agentrl.recipe.schema import Algorithm, Proximal, Topology
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.losses import rl_loss
from megatron_agentrl.trainer.step import forward_logprobs, train_step
from megatron_agentrl.trainer.topology import Rank

#: Fills a rank's chunks with weights.
Load = Callable[[list[Any]], None]

#: Data-parallel size -> rank -> micro-batches of rows; lengths differ inside each, and one is empty.
PLANS = {1: [[(0, 1, 2, 3, 4), (), (5,)]], 2: [[(0, 1, 2, 3), (4,)], [(5,), ()]]}


def rl_rows(which: tuple[int, ...]) -> MicroBatch:
    """Rows with every column a reinforcement loss reads; about a third of the tokens is context."""
    batch = toy.rows(which)
    for at, row in enumerate(which):
        generator = torch.Generator().manual_seed(row)
        length = int(batch.lengths_B[at])
        mask = (torch.rand(length, generator=generator) < 0.7).float()
        mask[0] = 0.0
        batch.columns["mask"][at, :length] = mask
        for name, scale, shift in (("behaviour_logprobs", -9.0, 0.0), ("advantages", 2.0, 1.0)):
            column = batch.columns.setdefault(name, torch.zeros_like(batch.columns["mask"]))
            values = torch.rand(length, generator=generator) * scale - shift
            column[at, :length] = values * mask
    return batch


def tensors_of(chunks: list[Any], rank: Rank, read: Any) -> dict[str, torch.Tensor]:
    """read(parameter) under the names of one process: experts are numbered over all expert-parallel ranks."""
    found = {}
    for key, parameter in chunks[0].module.named_parameters():
        head, local, tail = key.partition("local_experts.")
        if local:
            number, rest = tail.split(".", 1)
            held = toy.MODELS["qwen"]["num_experts"] // rank.ep_size
            key = f"{head}{local}{int(number) + rank.ep * held}.{rest}"
        found[key] = read(parameter).detach().clone()
    return found


def copied(rank: Rank, start: dict[str, torch.Tensor]) -> Load:
    """Puts the weights of one process into the model of a rank that holds whole parameters."""

    def load(chunks: list[Any]) -> None:
        names = tensors_of(chunks, rank, lambda p: p)
        with torch.no_grad():
            for key, parameter in zip(names, chunks[0].module.parameters(), strict=True):
                parameter.copy_(start[key])

    return load


def measure(name: str, rank: Rank, topo: Topology, packing: bool, load: Load | None = None) -> dict:
    """Four SGD steps (losses, norms, first gradients, end weights), four Adam steps, one reinforcement step.

    Args:
        load: puts the weights to begin with into the chunks; None keeps the seed's.
    """
    plan = PLANS[rank.dp_size][rank.dp]

    def built(opt: Any) -> tuple[list[Any], Any]:
        chunks, _ = made = toy.build(name, rank, opt, topo, packing)
        if load is not None:
            load(chunks)
            made[1].reload_model_params()
        return made

    chunks, opt = built(toy.SGD)
    found: dict[str, Any] = {"start": tensors_of(chunks, rank, lambda p: p)}
    batches = [toy.rows(rows) for rows in plan]
    found["logprobs"] = dict(zip(plan, forward_logprobs(chunks, batches, temperature=0.7), strict=True))
    for kind, adam in (("sgd", False), ("adam", True)):
        if adam:
            chunks, opt = built(toy.ADAM)
        for step in range(1, 5):
            lr = 1e-3 if adam else 0.1
            result = train_step(chunks, opt, batches, toy.negative_logprob, lr=lr, tokens=toy.TOKENS, step=step)
            found.setdefault(kind, []).append([result.loss, result.grad_norm, result.metrics["tokens"]])
            if step == 1 and not adam:
                found["gradients"] = tensors_of(chunks, rank, lambda p: p.main_grad)
        if not adam:
            found["end"] = tensors_of(chunks, rank, lambda p: p)

    chunks, opt = built(toy.SGD)
    batches = [rl_rows(rows) for rows in plan]
    for batch, logprobs in zip(batches, forward_logprobs(chunks, batches), strict=True):
        batch.columns["reference"] = logprobs * 1.1
    loss = rl_loss(Algorithm(proximal=Proximal.recomputed, kl_coef=0.3))
    result = train_step(chunks, opt, batches, loss, lr=0.1, tokens=30.0)
    found["rl"] = {"loss": result.loss, "grad_norm": result.grad_norm, **result.metrics}
    return found
