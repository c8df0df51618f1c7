"""Run as two processes by test_convert_trainer: every layout loads every converted model through the trainer.

argv: shared folder, then LAYOUT=MODEL,MODEL. Parameters must equal those that `load_hf` reads from the Hugging Face
folder; afterwards each is saved again as `MODEL-LAYOUT` in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_agentrl.cpu import megatron

megatron.install()

import processes  # noqa: E402
import torch  # noqa: E402

from megatron_agentrl.recipe.schema import Optimizer, Recipe, Topology  # noqa: E402
from megatron_agentrl.trainer import checkpoint, model, optimizer, topology  # noqa: E402
from megatron_agentrl.trainer.weights_io import load_hf, placed  # noqa: E402

LAYOUTS = {
    "tp2": Topology(world=2, tp=2, sequence_parallel=True),
    "pp2": Topology(world=2, pp=2, first_stage_layers=4, last_stage_layers=2),
    "ep2": Topology(world=2, ep=2),
    "tp2-ep2": Topology(world=2, tp=2, sequence_parallel=True, ep=2, etp=1),
}


def main() -> None:
    shared = Path(sys.argv[1])
    for number, argument in enumerate(sys.argv[2:]):
        layout, names = argument.split("=")
        processes.meeting(number)
        rank = topology.init(LAYOUTS[layout], seed=1, timeout=60)
        for name in names.split(","):
            hf, recipe = json.loads((shared / name / "config.json").read_text()), Recipe()
            recipe.topology = LAYOUTS[layout]
            chunks = optimizer.wrap(model.build(hf, recipe, rank), Optimizer(), recipe)
            load_hf(chunks, hf, shared / name, rank)
            want = [(place.name, tensor.clone()) for place, tensor in placed(chunks, hf, rank)]
            for _, tensor in placed(chunks, hf, rank):
                tensor.fill_(-7)
            checkpoint.load_weights(shared / f"{name}-m", chunks)
            for (what, expected), (_, tensor) in zip(want, placed(chunks, hf, rank), strict=True):
                assert torch.equal(tensor, expected), f"{layout} {name} {what}"
            checkpoint.save_weights(shared / f"{name}-{layout}", chunks)
        topology.shutdown()


if __name__ == "__main__":
    main()
