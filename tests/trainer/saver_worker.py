"""Run as two data-parallel processes by test_checkpoint_saver: background saves of which rank 1 is held up.

argv: shared folder. Leaves `{rank}.json` there.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from megatron_agentrl.cpu import megatron

megatron.install()

import parity  # noqa: E402
import torch  # noqa: E402
import trainer_toy as toy  # noqa: E402
from test_checkpoint_saver import saver  # noqa: E402

from megatron_agentrl.recipe.schema import Dtype, Topology  # noqa: E402
from megatron_agentrl.trainer import checkpoint, model, optimizer, topology  # noqa: E402
from megatron_agentrl.trainer.checkpoint_saver import LateSave  # noqa: E402
from megatron_agentrl.trainer.step import train_step  # noqa: E402
from megatron_agentrl.trainer.topology import Rank  # noqa: E402

DP2 = Topology(world=2)


def build(rank: Rank, dtype: Dtype = Dtype.fp32) -> tuple[list[Any], Any]:
    topology.seed_everything(3)
    made = toy.recipe(DP2)
    made.model.dtype = dtype
    chunks = optimizer.wrap(model.build(toy.NEMOTRON, made, rank), toy.ADAM, made)
    return chunks, optimizer.build(chunks, toy.ADAM, made)


def steps(chunks: list[Any], opt: Any, rank: Rank, first: int, last: int) -> list[float]:
    batches = [toy.rows(rows) for rows in parity.PLANS[2][rank.dp]]
    return [
        train_step(chunks, opt, batches, toy.negative_logprob, lr=1e-2, tokens=toy.TOKENS, step=step).loss
        for step in range(first, last)
    ]


def hold_up() -> list[threading.Event]:
    """From now on this rank's writes begin when their event is set: the other rank's file system is faster."""
    held: list[threading.Event] = []
    write = checkpoint.Started.write

    def waiting(started: checkpoint.Started) -> None:
        held.append(threading.Event())
        held[-1].wait()
        write(started)

    checkpoint.Started.write = waiting  # type: ignore[method-assign]
    return held


def background(shared: Path, rank: Rank) -> dict[str, Any]:
    chunks, opt = build(rank)
    steps(chunks, opt, rank, 1, 3)
    write = checkpoint.Started.write
    held = hold_up() if rank.rank == 1 else []
    writer = saver(shared / "run")
    writer.save(chunks, opt, 2, {})
    found: dict[str, Any] = {"polls": [], "went_on": []}
    for step in range(3, 6):
        found["went_on"] += steps(chunks, opt, rank, step, step + 1)
        found["polls"].append(writer.poll())
    found["newest_meanwhile"] = checkpoint.newest(shared / "run").step
    for event in held:
        event.set()
    done = writer.wait()
    assert done is not None
    found |= {"completed": done.name, "newest": checkpoint.newest(shared / "run").step}

    writer = saver(shared / "late", deadline=1.0)
    writer.save(chunks, opt, 5, {})
    try:
        writer.wait()
    except LateSave as error:
        found["late"] = str(error)
    for event in held:
        event.set()
    checkpoint.Started.write = write  # type: ignore[method-assign]

    chunks, opt = build(rank)
    checkpoint.load(done, chunks, opt)
    return found | {"again": steps(chunks, opt, rank, 3, 6)}


def another_type(shared: Path, rank: Rank) -> dict[str, Any]:
    """Saved in bf16, loaded in fp32: parameters that differ between the ranks, and such as are bf16 numbers throughout."""
    chunks, opt = build(rank, Dtype.bf16)
    steps(chunks, opt, rank, 1, 3)
    folder = checkpoint.save(shared / "bf16", chunks, opt, 2, {})
    chunks, opt = build(rank)
    checkpoint.load(folder, chunks, opt)
    unequal, rounded = [], 0
    for name, parameter in chunks[0].named_parameters():
        least, most = parameter.detach().clone(), parameter.detach().clone()
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if not torch.equal(least, most):
            unequal.append(name)
        rounded += torch.equal(parameter, parameter.bfloat16().float())
    return {"unequal": unequal, "rounded": rounded}


def main() -> None:
    shared = Path(sys.argv[1])
    rank = topology.init(DP2, seed=1, timeout=120)
    found = background(shared, rank) | another_type(shared, rank)
    (shared / f"{rank.rank}.json").write_text(json.dumps(found))
    topology.shutdown()


if __name__ == "__main__":
    main()
