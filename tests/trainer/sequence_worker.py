"""Run as several processes by test_context_parallel. argv: shared folder, then CASE=PORT for each case.

Leaves `{case}-{model}-{rank}.pt` with what `sequence_cases.measure` found.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from megatron_agentrl.cpu import megatron

megatron.install()

import torch  # noqa: E402
import trainer_toy as toy  # noqa: E402
from sequence_cases import copied, measure  # noqa: E402

from megatron_agentrl.recipe.schema import Topology  # noqa: E402
from megatron_agentrl.trainer import checkpoint, topology  # noqa: E402

CASES = {
    "cp2": Topology(world=2, cp=2),
    "cp2-ep2": Topology(world=2, cp=2, ep=2),
    "cp2-dp2": Topology(world=4, cp=2),
    "cp2-tp2-sp": Topology(world=4, cp=2, tp=2, sequence_parallel=True, etp=1),
    "cp2-pp2": Topology(world=4, cp=2, pp=2),
}


def main() -> None:
    shared = Path(sys.argv[1])
    for case, port in (argument.split("=") for argument in sys.argv[2:]):
        os.environ["MASTER_PORT"] = port
        topo = CASES[case]
        rank = topology.init(topo, seed=1, timeout=120)
        whole = topo.tp == topo.pp == 1  # each rank holds whole parameters, so that names and shapes are one process's
        for name in toy.MODELS:
            if not whole and name == "qwen":
                continue  # tensor parallel: three query groups; pipeline: one model is enough
            if whole:
                load = copied(rank, torch.load(shared / f"start-{name}.pt"))
            else:
                load = partial(checkpoint.load_weights, shared / f"start-{name}")
            for packing in (False, True):
                found = measure(name, rank, topo, packing, load)
                torch.save(found, shared / f"{case}-{name}-{packing}-{rank.rank}.pt")
        topology.shutdown()


if __name__ == "__main__":
    main()
