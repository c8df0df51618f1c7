"""Run as two processes by test_architecture_parity: every (layout, model) case of both, one start.

argv: shared folder, then LAYOUT=MODEL,MODEL for each layout. Leaves `results-{rank}.json` and weight
checkpoints in the folder, as trainer_worker does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import processes
from trainer_worker import gradients  # installs the CPU shim

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import topology

LAYOUTS = {
    "ep2": Topology(world=2, ep=2),
    "tp2-sp": Topology(world=2, tp=2, sequence_parallel=True),
    "tp2-sp-ep2": Topology(world=2, tp=2, sequence_parallel=True, ep=2, etp=1),
    "pp2": Topology(world=2, pp=2),
}


def main() -> None:
    shared, found = Path(sys.argv[1]), {}
    for number, argument in enumerate(sys.argv[2:]):
        layout, names = argument.split("=")
        processes.meeting(number)
        rank = topology.init(LAYOUTS[layout], seed=1, timeout=60)
        for name in names.split(","):
            found[f"{layout} {name}"] = gradients(shared, layout, name, rank, LAYOUTS[layout])
        topology.shutdown()
    (shared / f"results-{rank.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
