"""Run as two processes by test_mtp_parallel: latent attention and prediction heads in each layout, one start.

argv: shared folder, then the layouts. Leaves `mtp-results-{rank}.json` and weight checkpoints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_agentrl.cpu import megatron

megatron.install()

import mtp_toy  # noqa: E402
import processes  # noqa: E402
import trainer_toy as toy  # noqa: E402

from megatron_agentrl.recipe.schema import Topology  # noqa: E402
from megatron_agentrl.trainer import checkpoint, topology  # noqa: E402
from megatron_agentrl.trainer.step import train_step  # noqa: E402

LAYOUTS = {
    "ep2": Topology(world=2, ep=2),
    "tp2-sp": Topology(world=2, tp=2, sequence_parallel=True),
    "tp2-sp-ep2": Topology(world=2, tp=2, sequence_parallel=True, ep=2, etp=1),
    "pp2": Topology(world=2, pp=2),
    "cp2-ep2-packed": Topology(world=2, cp=2, ep=2),
}
#: Data-parallel rank -> micro-batches of rows; lopsided, with an empty one.
TWO = {0: [(0, 1, 2, 3), (4,)], 1: [(5,), ()]}
WHOLE = [(5,), (), (0, 1, 2, 3, 4)]
STEPS = 4


def run(shared: Path, layout: str, name: str, rank: topology.Rank, topo: Topology, **mtp: object) -> list:
    """[loss, gradient norm, heads' cross entropy] of four SGD steps; step 1's gradient and the end as checkpoints."""
    batches = [toy.rows(rows) for rows in (TWO[rank.dp] if rank.dp_size == 2 else WHOLE)]
    chunks, opt = mtp_toy.build(name, rank, toy.SGD, topo, packing=layout.endswith("packed"), **mtp)
    checkpoint.load_weights(shared / f"start-{name}", chunks)
    found = []
    for step in range(1, STEPS + 1):
        result = train_step(chunks, opt, batches, toy.negative_logprob, lr=0.1, tokens=toy.TOKENS, step=step)
        found.append([result.loss, result.grad_norm, result.metrics["mtp_cross_entropy"]])
        if step == 1:
            kept = [parameter.detach().clone() for parameter in chunks[0].parameters()]
            for parameter in chunks[0].parameters():
                parameter.data.copy_(parameter.main_grad)
            checkpoint.save_weights(shared / f"gradient-{layout}-{name}", chunks)
            for parameter, value in zip(chunks[0].parameters(), kept, strict=True):
                parameter.data.copy_(value)
    checkpoint.save_weights(shared / f"end-{layout}-{name}", chunks)
    return found


def main() -> None:
    shared, layouts = Path(sys.argv[1]), sys.argv[2:]
    found: dict = {}
    for number, layout in enumerate(layouts):
        processes.meeting(number)
        rank = topology.init(LAYOUTS[layout], seed=1, timeout=120)
        for name in mtp_toy.MODELS:
            found[f"{layout} {name}"] = run(shared, layout, name, rank, LAYOUTS[layout])
        if layout == "pp2":  # the embedding stands on both stages, and both give it a gradient
            found["pp2 attached deepseek"] = run(shared, "attached", "deepseek", rank, LAYOUTS[layout], detach=False)
        topology.shutdown()
    (shared / f"mtp-results-{rank.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
