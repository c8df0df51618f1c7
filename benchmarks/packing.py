"""One training step over rows of mixed lengths, padded against packed, on this process: `python -m benchmarks.packing`.

The same rows, the same budget of positions a micro-batch, the same model with random weights; the two layouts take
turns, and the least time of each counts. CPU seconds are of this process alone, so that they hold on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_agentrl.cpu import megatron

megatron.install()

from megatron_agentrl.data.packing import Multiples, first_fit  # noqa: E402
from megatron_agentrl.recipe.schema import Optimizer, Recipe, Topology  # noqa: E402
from megatron_agentrl.trainer import model, optimizer, topology  # noqa: E402
from megatron_agentrl.trainer.batch import MicroBatch, sft_micro_batch  # noqa: E402
from megatron_agentrl.trainer.losses import sft_loss  # noqa: E402
from megatron_agentrl.trainer.step import train_step  # noqa: E402

HYBRID: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 512, "hidden_size": 128, "hybrid_override_pattern": "M*EM-E",
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "ssm_state_size": 32,
    "mamba_head_dim": 32, "mamba_num_heads": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "n_shared_experts": 1, "norm_topk_prob": True, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODELS = {"hybrid": HYBRID, "moe": MOE}

Row = tuple[list[int], list[int]]


def mixed_rows(count: int, median: float, spread: float, longest: int, seed: int) -> list[Row]:
    """Rows with log-normal lengths, as answers of agents have."""
    draw = random.Random(seed)
    lengths = [min(longest, max(4, round(draw.lognormvariate(math.log(median), spread)))) for _ in range(count)]
    return [([draw.randrange(512) for _ in range(n)], [1] * n) for n in lengths]


def by_length(rows: list[Row], budget: int) -> list[list[Row]]:
    """Padded micro-batches: neighbours in length, rows x longest within the budget."""
    plan: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row[0])):
        if plan[-1] and (len(plan[-1]) + 1) * len(row[0]) > budget:
            plan.append([])
        plan[-1].append(row)
    return plan


def as_they_come(rows: list[Row], budget: int) -> list[list[Row]]:
    """Padded micro-batches without sorting, as a loader without a plan makes them."""
    plan: list[list[Row]] = [[]]
    for row in rows:
        if plan[-1] and (len(plan[-1]) + 1) * max(len(ids) for ids, _ in [*plan[-1], row]) > budget:
            plan.append([])
        plan[-1].append(row)
    return plan


def packed(rows: list[Row], budget: int) -> list[list[Row]]:
    return [[rows[i] for i in part] for part in first_fit([[len(ids)] for ids, _ in rows], budget, Multiples())]


#: Name -> (how rows become micro-batches, whether the model packs).
LAYOUTS: dict[str, tuple[Callable[[list[Row], int], list[list[Row]]], bool]] = {
    "padded, as they come": (as_they_come, False),
    "padded, by length": (by_length, False),
    "packed": (packed, True),
}


def positions(batches: list[MicroBatch], packing: bool) -> int:
    if packing:
        return sum(Multiples().positions(batch.lengths_B.tolist()) for batch in batches)
    return sum(batch.ids_BT.shape[0] * (batch.ids_BT.shape[1] - 1) for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--median", type=float, default=60.0)
    parser.add_argument("--spread", type=float, default=0.9)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rank = topology.init(Topology(), seed=1)
    rows = mixed_rows(options.rows, options.median, options.spread, options.longest, seed=7)
    tokens = float(sum(len(ids) - 1 for ids, _ in rows))
    opt = Optimizer(name="sgd", clip_grad=0.0)
    found = []
    for name, hf in MODELS.items():
        chunks = optimizer.wrap(model.build(hf, Recipe(), rank), opt)
        built = optimizer.build(chunks, opt)
        taken: dict[str, list[tuple[float, float]]] = {layout: [] for layout in LAYOUTS}
        losses, made = {}, {}
        for layout, (plan, _) in LAYOUTS.items():
            made[layout] = [sft_micro_batch(part, 0) for part in plan(rows, options.budget)]
        for _ in range(options.repeats):
            for layout, (_, packing) in LAYOUTS.items():
                chunks[0].module.packing = packing
                wall, cpu = time.perf_counter(), time.process_time()
                losses[layout] = train_step(chunks, built, made[layout], sft_loss, lr=0.0, tokens=tokens).loss
                taken[layout].append((time.process_time() - cpu, time.perf_counter() - wall))
        for layout, (_, packing) in LAYOUTS.items():
            held = positions(made[layout], packing)
            row = {
                "model": name, "layout": layout, "micro_batches": len(made[layout]), "positions": held,
                "padding": round(1 - tokens / held, 3), "cpu_s": round(min(cpu for cpu, _ in taken[layout]), 4),
                "wall_s": round(min(wall for _, wall in taken[layout]), 4), "loss": losses[layout],
            }  # fmt: skip
            found.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": None}, "rows": found}, indent=1))
    topology.shutdown()


if __name__ == "__main__":
    main()
