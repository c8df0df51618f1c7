"""One policy with a reference of its own architecture and a teacher of another: shared by one process and by two.

Run as two processes by test_frozen: `python frozen_cases.py FOLDER LAYOUT...`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from megatron_agentrl.cpu import megatron

    megatron.install()

import processes
import torch
import trainer_toy as toy
from safetensors.torch import save_file

from megatron_agentrl.recipe.schema import Optimizer, Recipe, Topology
from megatron_agentrl.trainer import model, optimizer, topology
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.frozen import frozen_policies
from megatron_agentrl.trainer.losses import rl_loss
from megatron_agentrl.trainer.step import forward_logprobs, train_step
from megatron_agentrl.trainer.topology import Rank
from megatron_agentrl.trainer.weights_io import iterate_hf, load_hf

POLICY = toy.NEMOTRON
TEACHER = toy.QWEN | {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 48}
LAYOUTS = {
    "TP2": Topology(world=2, tp=2, sequence_parallel=True),
    "PP2": Topology(world=2, pp=2),
    "EP2": Topology(world=2, ep=2),
    "DP2 overlap": Topology(world=2, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=2000),
}
ADAM = Optimizer(name="adam", lr=1e-3, router_bias_rate=1e-3)
TEMPERATURE = 0.8
#: Rows of each data-parallel rank's micro-batches.
PLANS = {1: [[(5, 1), (0, 2, 3, 4)]], 2: [[(0, 1, 2, 3), (4,)], [(5,), ()]]}


def recipe(shared: Path, sizes: Topology | None = None) -> Recipe:
    made = toy.recipe(sizes)
    made.optimizer = ADAM
    made.algorithm.kl_coef, made.algorithm.reference_path = 0.3, str(shared / "reference")
    made.algorithm.teacher_coef, made.algorithm.teacher_path = 0.5, str(shared / "teacher")
    return made


def write_folder(folder: Path, hf: dict[str, Any], rank: Rank, seed: int) -> None:
    """A Hugging Face folder of weights drawn from `seed`, expert biases included. One process."""
    topology.seed_everything(seed)
    chunks = model.build(hf, toy.recipe(), rank)
    for router in optimizer.routers(chunks):
        router.expert_bias.normal_(std=0.1)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    tensors = iterate_hf(chunks, hf, rank, torch.float32)
    save_file({key: t.clone() for key, t in tensors if t is not None}, folder / "model.safetensors")


def write_folders(shared: Path, rank: Rank) -> None:
    write_folder(shared / "policy", POLICY, rank, 3)
    write_folder(shared / "reference", POLICY, rank, 4)
    write_folder(shared / "teacher", TEACHER, rank, 5)


def build(shared: Path, rank: Rank, made: Recipe) -> tuple[list[Any], Any]:
    chunks = model.build(POLICY, made, rank)
    load_hf(chunks, POLICY, shared / "policy", rank)
    chunks = optimizer.wrap(chunks, made.optimizer, made)
    return chunks, optimizer.build(chunks, made.optimizer, made)


def batches(rank: Rank) -> list[MicroBatch]:
    """Every token's engine logprob is -4.5; row i's advantage is 1 - i / 2."""
    found = []
    for rows in PLANS[rank.dp_size][rank.dp]:
        batch = toy.rows(rows)
        if rows:
            mask_BT = batch.columns["mask"]
            batch.columns["behaviour_logprobs"] = -4.5 * mask_BT
            batch.columns["advantages"] = mask_BT * torch.tensor([[1 - row / 2] for row in rows])
        found.append(batch)
    return found


def held(chunks: list[Any], opt: Any) -> list[torch.Tensor]:
    """All of a rank's numbers: weights, expert biases, masters and moments."""
    found = [tensor for chunk in chunks for tensor in chunk.state_dict().values() if torch.is_tensor(tensor)]
    for part in optimizer.parts(opt):
        for group in part.optimizer.param_groups:
            found += group["params"]
        for state in part.optimizer.state.values():
            found += [value for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in found]


def step_between(shared: Path, rank: Rank, sizes: Topology) -> dict[str, Any]:
    """A step of another loss, the frozen policies' pass, then the recipe's own step."""
    made = recipe(shared, sizes)
    chunks, opt = build(shared, rank, made)
    policies = frozen_policies(made, chunks, POLICY, rank, shared / "unused", resume=False)
    data = batches(rank)
    train_step(chunks, opt, data, toy.negative_logprob, lr=1e-3, tokens=toy.TOKENS)
    found: dict[str, Any] = {}

    def keep(column: str, scored: list[torch.Tensor]) -> None:
        found[column] = {
            row: logprobs_BT[at, : toy.LENGTHS[row]].tolist()
            for rows, logprobs_BT in zip(PLANS[rank.dp_size][rank.dp], scored, strict=True)
            for at, row in enumerate(rows)
        }

    for column, policy in policies.items():
        # The first settles what overlap left underway, which is a change of the rank's numbers by itself.
        policy.logprobs(data, TEMPERATURE)
        before = held(chunks, opt)
        scored = policy.logprobs(data, TEMPERATURE)
        pairs = zip(before, held(chunks, opt), strict=True)
        found[f"{column} leaves all as it was"] = all(torch.equal(left, right) for left, right in pairs)
        keep(column, scored)
        for batch, logprobs_BT in zip(data, scored, strict=True):
            batch.columns[column] = logprobs_BT
    keep("policy", forward_logprobs(chunks, data, TEMPERATURE))
    result = train_step(
        chunks, opt, data, rl_loss(made.algorithm), lr=1e-3, tokens=toy.TOKENS, temperature=TEMPERATURE, step=2
    )
    return found | {"loss": result.loss, "norm": result.grad_norm, "metrics": result.metrics}


def main() -> None:
    shared, layouts = Path(sys.argv[1]), sys.argv[2:]
    found = {}
    for number, layout in enumerate(layouts):
        processes.meeting(number)
        rank = topology.init(LAYOUTS[layout], seed=1, timeout=120)
        found[layout] = step_between(shared, rank, LAYOUTS[layout])
        topology.shutdown()
    (shared / f"found-{rank.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
