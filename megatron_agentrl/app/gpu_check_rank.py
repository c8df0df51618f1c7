"""One rank of `app.gpu_check`: runs the planned checks in order and leaves a JSON file for each.

Everything goes through the trainer's own functions, with a recipe made of overrides as on the command line. All
checks use one small Nemotron-H model whose weights come from a folder, so that every layout starts from the same.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron_agentrl.cpu import megatron as cpu_megatron

    cpu_megatron.install()

from megatron_agentrl.recipe.leaves import get, leaves
from megatron_agentrl.recipe.schema import Optimizer, Recipe
from megatron_agentrl.recipe.values import parse
from megatron_agentrl.trainer import layers, model, optimizer, topology
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.logprobs import token_logprobs
from megatron_agentrl.trainer.random_init import write_random
from megatron_agentrl.trainer.step import forward_logprobs, train_step
from megatron_agentrl.trainer.weights_io import load_hf

#: Every linear has sides that are multiples of 128, but for Mamba's input projection (2336, a multiple of 32).
MODEL = {
    "model_type": "nemotron_h", "vocab_size": 1024, "hidden_size": 256, "hybrid_override_pattern": "M*E-M*E-",
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "ssm_state_size": 64,
    "mamba_head_dim": 32, "mamba_num_heads": 32, "n_groups": 2, "conv_kernel": 4, "chunk_size": 128, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
}  # fmt: skip
LENGTHS = (33, 64, 17, 48, 25, 56, 64, 9)
TOKENS = float(sum(LENGTHS) - len(LENGTHS))
ADAM = Optimizer(lr=1e-3, clip_grad=1.0)
STEPS = 4


def recipe(settings: dict[str, str], world: int) -> Recipe:
    made = Recipe()
    made.topology.world = world
    for key, text in settings.items():
        section, _, name = key.rpartition(".")
        setattr(get(made, section), name, parse(leaves()[key], text))
    return made


def micro_batches(rank: topology.Rank) -> list[MicroBatch]:
    """This data-parallel rank's rows in two micro-batches; row i is the same in every layout."""
    mine = list(range(len(LENGTHS)))[rank.dp :: rank.dp_size]
    return [rows(mine[: len(mine) // 2]), rows(mine[len(mine) // 2 :])]


def rows(which: list[int]) -> MicroBatch:
    longest = max(LENGTHS[i] for i in which)
    ids_BT, mask_BT = torch.zeros(len(which), longest, dtype=torch.int64), torch.zeros(len(which), longest)
    for at, i in enumerate(which):
        ids = torch.randint(0, MODEL["vocab_size"], (LENGTHS[i],), generator=torch.Generator().manual_seed(i))  # type: ignore[call-overload]
        ids_BT[at, : LENGTHS[i]] = ids
        mask_BT[at, 1 : LENGTHS[i]] = 1.0
    return MicroBatch(ids_BT, torch.tensor([LENGTHS[i] for i in which]), {"mask": mask_BT})


def negative_logprob(logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs_BT * batch.columns["mask"]).sum(), {}


class Refused(Exception):
    """The trainer does not offer this; its own reason."""


class Bench:
    """One rank and the folder that holds the weights and the results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def build(self, made: Recipe, rank: topology.Rank) -> tuple[list[Any], Any]:
        try:
            chunks = model.build(MODEL, made, rank)
        except ValueError as error:
            raise Refused(str(error)) from error
        load_hf(chunks, MODEL, self.folder / "weights", rank)
        wrapped = optimizer.wrap(chunks, ADAM, made)
        return wrapped, optimizer.build(wrapped, ADAM, made)

    def steps(self, made: Recipe, rank: topology.Rank) -> dict[str, Any]:
        """Losses and gradient norms of four Adam steps on the same batch."""
        chunks, opt = self.build(made, rank)
        results = [
            train_step(chunks, opt, micro_batches(rank), negative_logprob, lr=ADAM.lr, tokens=TOKENS, step=step)
            for step in range(1, STEPS + 1)
        ]
        return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}

    def reference(self) -> dict[str, Any]:
        return json.loads((self.folder / "one-process.json").read_text())


def gap(found: list[float], wanted: list[float]) -> float:
    """Largest relative difference; NaN where either holds one."""
    gaps = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def reference(bench: Bench, made: Recipe, rank: topology.Rank) -> dict[str, Any]:
    found = bench.steps(made, rank)
    falls = all(math.isfinite(x) for x in found["losses"]) and found["losses"][-1] < found["losses"][0]
    return {**found, "measured": 0.0, "fault": None if falls else f"the loss does not fall: {found['losses']}"}


def steps(bench: Bench, made: Recipe, rank: topology.Rank) -> dict[str, Any]:
    found, wanted = bench.steps(made, rank), bench.reference()
    exact = made.model.dtype.value == "fp32"
    norms = gap(found["norms"], wanted["norms"]) if exact else 0.0
    fault = None if all(map(math.isfinite, found["norms"])) else f"gradient norms {found['norms']}"
    return {**found, "measured": max(gap(found["losses"], wanted["losses"]), norms), "fault": fault}


def offload(bench: Bench, made: Recipe, rank: topology.Rank) -> dict[str, Any]:
    found = bench.steps(made, rank)
    made.memory.optimizer_offload = 0.0
    return {**found, "measured": gap(found["losses"], bench.steps(made, rank)["losses"])}


def spec(bench: Bench, made: Recipe, rank: topology.Rank) -> dict[str, Any]:
    """Transformer Engine's layers and torch's on the same weights."""

    def keys() -> set[str]:
        chunks, _ = bench.build(made, rank)
        found = chunks[0].module.sharded_state_dict()
        return {value.key for name, value in found.items() if hasattr(value, "key") and "_extra_state" not in name}

    engine_keys, found = keys(), bench.steps(made, rank)
    present, layers.HAVE_TE = layers.HAVE_TE, False
    try:
        local_keys, wanted = keys(), bench.steps(made, rank)
    finally:
        layers.HAVE_TE = present
    fault = None if engine_keys == local_keys else f"keys differ: {sorted(engine_keys ^ local_keys)[:4]}"
    return {**found, "measured": gap(found["losses"], wanted["losses"]), "fault": fault}


def logprobs(bench: Bench, made: Recipe, rank: topology.Rank) -> dict[str, Any]:
    chunks, _ = bench.build(made, rank)
    worst = 0.0
    for i in range(len(LENGTHS)):
        batch = rows([i])
        ids = batch.ids_BT.to(rank.device)
        got = forward_logprobs(chunks, [batch], temperature=0.7)[0][0, 1:]
        chunks[0].eval()
        with torch.no_grad():
            logits = chunks[0](ids[:, :-1], torch.arange(ids.shape[1] - 1, device=ids.device)[None], None)
        exact = (logits[..., : MODEL["vocab_size"]].double() / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])  # type: ignore[misc]
        worst = max(worst, float((got.double() - exact[0, :, 0].cpu()).abs().max()))
    return {"measured": worst}


def logprob_memory(bench: Bench, made: Recipe, rank: topology.Rank) -> dict[str, Any]:
    """Peak beyond the bf16 logits themselves, forward and backward, in units of one fp32 copy of them."""
    tokens, columns = 4096, 131_072
    logits = torch.randn(1, tokens, columns, dtype=torch.bfloat16, device=rank.device, requires_grad=True)
    ids = torch.randint(0, columns, (1, tokens), device=rank.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(logits, ids, 1.0, columns).sum().backward()
    return {"measured": (torch.cuda.max_memory_allocated() - before) / (4 * tokens * columns)}


KINDS = {f.__name__: f for f in (reference, steps, offload, spec, logprobs, logprob_memory)}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # fp32 is compared as fp32
    bench, world = Bench(folder), int(os.environ["WORLD_SIZE"])
    for check in json.loads((folder / "plan.json").read_text()):
        os.environ["MASTER_PORT"] = str(check["port"])
        t0, made = time.monotonic(), recipe(check["settings"], world)
        try:
            rank = topology.init(made.topology, seed=1)
        except ValueError as error:
            found: dict[str, Any] = {"refused": str(error)}
            first = os.environ["RANK"] == "0"
        else:
            first = rank.is_first
            if first and not (folder / "weights").is_dir():
                (folder / "model").mkdir()
                (folder / "model" / "config.json").write_text(json.dumps(MODEL))
                write_random(folder / "weights", folder / "model", seed=1)
            torch.distributed.barrier()
            try:
                found = KINDS[check["kind"]](bench, made, rank)
            except Refused as error:
                found = {"refused": str(error)}
            topology.shutdown()
        if first:
            result = folder / f"{check['name'].replace('/', '-')}.json"
            result.with_suffix(".tmp").write_text(json.dumps(found | {"seconds": time.monotonic() - t0}))
            result.with_suffix(".tmp").rename(result)


if __name__ == "__main__":
    main()
