"""One optimizer step by topology, against one process and against plain transformers: `python -m benchmarks.train_step`.

The same tiny hybrid model (Mamba-2, attention, experts) and the same global batch everywhere, in float32. A topology's
step is the trainer's own: forward and backward over all micro-batches, gradients over ranks, Adam. `transformers` is
one forward and backward pass of its own implementation over the same micro-batches, without an optimizer. Two cores
and two processes cannot be faster than one process by much: this shows what a topology costs, not what it wins on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_agentrl.launch.endpoints import free_ports
from megatron_agentrl.recipe.schema import Optimizer, Recipe, Topology
from megatron_agentrl.recipe.topology_rules import topology_problems

MODEL: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 512, "hidden_size": 128, "hybrid_override_pattern": "M*EM*E",
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "ssm_state_size": 32, "mamba_head_dim": 32, "mamba_num_heads": 8, "n_groups": 2,
    "conv_kernel": 4, "chunk_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
}  # fmt: skip

TOPOLOGIES: dict[str, Topology] = {
    "1 process": Topology(),
    "DP2": Topology(world=2),
    "TP2+SP": Topology(world=2, tp=2, sequence_parallel=True, etp=1),
    "PP2": Topology(world=2, pp=2),
    "EP2": Topology(world=2, ep=2),
}
ROWS, LENGTH, MICRO_BATCHES = 16, 65, 4
#: Predicted tokens of the global batch.
TOKENS = ROWS * (LENGTH - 1)
WARM_UP = 2
#: Seconds that the processes of one world size may take.
DEADLINE = 150

EXAMPLES = """\
examples:
  python -m benchmarks.train_step
  python -m benchmarks.train_step --repeat 20 --json step.json
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__.split("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--repeat", type=int, default=10, help="timed steps of each row of the table (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error(f"--repeat {arguments.repeat}: expected at least 1")
    if arguments.worker:
        folder, *names = arguments.worker
        work(Path(folder), names, arguments.repeat)
        return 0
    rows = measure(arguments.repeat)
    for line in table(rows):
        print(line)
    if arguments.json:
        result = {"model": MODEL, "tokens": TOKENS, "repeat": arguments.repeat, "cores": os.cpu_count(), "rows": rows}
        partial = arguments.json.with_name(f"{arguments.json.name}.{os.getpid()}.tmp")
        partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        partial.replace(arguments.json)
    return 0


# ---- the measuring side ----------------------------------------------------------------------------------------


def measure(repeat: int) -> list[dict[str, Any]]:
    """One row for each topology, transformers first; a topology that cannot be has its reason instead of times."""
    refused = {name: reason for name, sizes in TOPOLOGIES.items() for reason in topology_problems(sizes, MODEL)}
    names = [name for name in TOPOLOGIES if name not in refused]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world, group in ((1, ["transformers"]), (1, names), (2, names)):
            chosen = [name for name in group if name not in TOPOLOGIES or TOPOLOGIES[name].world == world]
            if chosen:
                found |= start(Path(folder), world, chosen, repeat)
    base = found["1 process"]["seconds"]
    rows = []
    for name in ("transformers", *TOPOLOGIES):
        if name in refused:
            rows.append({"name": name, "refused": refused[name]})
            continue
        row = found[name]
        row |= {
            "tokens_per_second": TOKENS / row["seconds"],
            "against_one_process": row["seconds"] / base,
            "against_transformers": row["seconds"] / found["transformers"]["seconds"],
        }
        rows.append({"name": name, **row})
    return rows


def start(folder: Path, world: int, names: list[str], repeat: int) -> dict[str, dict[str, Any]]:
    """Run `names` one after the other in one set of processes; medians of the slowest rank, CPU seconds of all."""
    ports = [f"{name}={port}" for name, port in zip(names, free_ports("127.0.0.1", len(names)), strict=True)]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.train_step", "--repeat", str(repeat), "--worker", str(folder), *ports]  # fmt: skip
    env = dict(os.environ, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    started = [
        subprocess.Popen(command, env=dict(env, RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(process.returncode for process in started):
        raise SystemExit(f"{', '.join(names)} failed:\n" + "\n".join(outputs)[-4000:])
    found = {}
    for name in names:
        ranks = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world)]
        steps = [max(of_ranks) for of_ranks in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        found[name] = {
            "processes": world,
            "seconds": statistics.median(steps),
            "least_seconds": min(steps),
            "cpu_seconds": sum(statistics.median(rank["cpu"]) for rank in ranks),
            "loss": ranks[0]["loss"],
        }
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [("", "processes", "ms/step", "least", "CPU ms", "tokens/s", "/ 1 process", "/ transformers")]
    for row in rows:
        if "refused" in row:
            lines.append((row["name"], f"refused: {row['refused']}"))
            continue
        lines.append(
            (
                row["name"],
                str(row["processes"]),
                f"{1000 * row['seconds']:.1f}",
                f"{1000 * row['least_seconds']:.1f}",
                f"{1000 * row['cpu_seconds']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['against_one_process']:.2f}",
                f"{row['against_transformers']:.2f}",
            )
        )
    full = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(len(line[column]) for line in full) for column in range(len(lines[0]))]
    return [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=False))])
        for line in lines
    ]  # fmt: skip


# ---- one process of a row --------------------------------------------------------------------------------------


def work(folder: Path, names: list[str], repeat: int) -> None:
    """Time each of NAME=PORT in turn and leave the result in the folder."""
    for entry in names:
        name, _, port = entry.rpartition("=")
        os.environ["MASTER_PORT"] = port
        result = by_transformers(repeat) if name == "transformers" else by_trainer(TOPOLOGIES[name], repeat)
        (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(result))


def rows_of_micro_batches() -> list[Any]:
    """ids [ROWS / MICRO_BATCHES, LENGTH] of each micro-batch of the global batch."""
    import torch

    ids = torch.randint(0, MODEL["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return list(ids.chunk(MICRO_BATCHES))


def timed(step: Any, repeat: int) -> dict[str, Any]:
    """Wall and CPU seconds of each of `repeat` calls after the warm-up, and the first call's loss."""
    seconds, cpu, losses = [], [], []
    for _ in range(WARM_UP + repeat):
        wall, used = time.perf_counter(), time.process_time()
        losses.append(step())
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - used)
    return {"seconds": seconds[WARM_UP:], "cpu": cpu[WARM_UP:], "loss": losses[0]}


def by_trainer(sizes: Topology, repeat: int) -> dict[str, Any]:
    from megatron_agentrl.cpu import megatron

    megatron.install()
    import torch

    from megatron_agentrl.trainer import model, optimizer, topology
    from megatron_agentrl.trainer.batch import MicroBatch
    from megatron_agentrl.trainer.losses import sft_loss
    from megatron_agentrl.trainer.step import train_step

    rank = topology.init(sizes, seed=0, timeout=60)
    recipe, adam = Recipe(), Optimizer(lr=1e-4)
    recipe.topology = sizes
    chunks = optimizer.wrap(model.build(MODEL, recipe, rank), adam, sizes)
    opt = optimizer.build(chunks, adam)
    batches = []
    for ids in rows_of_micro_batches()[rank.dp :: rank.dp_size]:
        mask = torch.ones(ids.shape)
        mask[:, 0] = 0
        batches.append(MicroBatch(ids, torch.full((len(ids),), LENGTH), {"mask": mask}))

    def step() -> float:
        torch.distributed.barrier()
        return train_step(chunks, opt, batches, sft_loss, lr=1e-4, tokens=TOKENS).loss

    result = timed(step, repeat)
    topology.shutdown()
    return result


def by_transformers(repeat: int) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = MODEL["model_type"]
    config = AutoConfig.for_model(kind, **{key: value for key, value in MODEL.items() if key != "model_type"})
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy.train()
    batches = rows_of_micro_batches()

    def step() -> float:
        policy.zero_grad()
        total = 0.0
        for ids in batches:
            logits = policy(input_ids=ids[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            (loss / TOKENS).backward()
            total += float(loss)
        return total / TOKENS

    return timed(step, repeat)


if __name__ == "__main__":
    sys.exit(main())
