"""Run as several processes by test_context_parallel. argv: shared folder, then the cases.

Leaves `{case}-{model}-{rank}.pt` with what `sequence_cases.measure` found.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from megatron_agentrl.cpu import megatron

megatron.install()

import processes  # noqa: E402
import torch  # noqa: E402
import trainer_toy as toy  # noqa: E402
from sequence_cases import copied, measure  # noqa: E402

from megatron_agentrl.recipe.schema import Topology  # noqa: E402
from megatron_agentrl.trainer import checkpoint, topology, weights_io  # noqa: E402

CASES = {
    "cp2": Topology(world=2, cp=2),
    "cp2-ep2": Topology(world=2, cp=2, ep=2),
    "cp2-dp2": Topology(world=4, cp=2),
    "cp2-tp2-sp": Topology(world=4, cp=2, tp=2, sequence_parallel=True, etp=1),
    "cp2-pp2": Topology(world=4, cp=2, pp=2),
}
#: Models of a case; both where none are named. Under tensor parallelism megatron-core asks for tp * cp to divide the heads.
MODELS = {"cp2-dp2": ["nemotron"], "cp2-tp2-sp": ["wide"], "cp2-pp2": ["nemotron"]}


def main() -> None:
    shared = Path(sys.argv[1])
    for number, case in enumerate(sys.argv[2:]):
        processes.meeting(number)
        topo = CASES[case]
        rank = topology.init(topo, seed=1, timeout=120)
        whole = topo.tp == topo.pp == 1  # each rank holds whole parameters, so that names and shapes are one process's
        for name in MODELS.get(case, toy.MODELS):
            if whole:
                load = copied(rank, torch.load(shared / f"start-{name}.pt"))
            else:
                load = partial(checkpoint.load_weights, shared / f"start-{name}")
            for packing in (False, True):
                found = measure(name, rank, topo, packing, load)
                torch.save(found, shared / f"{case}-{name}-{packing}-{rank.rank}.pt")
        if case == "cp2":  # what a publish sends: whole tensors on rank 0, from ranks that hold copies
            sent = weights_io.iterate_hf(
                toy.build("nemotron", rank, toy.SGD, topo)[0], toy.NEMOTRON, rank, torch.float32
            )
            torch.save({key: tensor for key, tensor in sent if tensor is not None}, shared / f"sent-{rank.rank}.pt")
        topology.shutdown()


if __name__ == "__main__":
    main()
