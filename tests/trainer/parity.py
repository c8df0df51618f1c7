"""The parity matrix: every layout of every toy model against one process, loss by loss and gradient by gradient.

`MODELS` and `LAYOUTS` are the two tables; a line more in either is a row or column more. One start of processes
serves all cells of a world size. A cell that cannot be is one that `check` refuses, with its words as the reason.

    python tests/trainer/parity.py [--worlds 2,3,4]     prints the table
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from megatron_agentrl.cpu import megatron

    megatron.install()

import mtp_toy
import processes
import torch
import trainer_toy as toy
from safetensors.torch import load_file, save_file

from megatron_agentrl.recipe.mtp_rules import mtp_problems
from megatron_agentrl.recipe.schema import Dispatcher, Optimizer, Recipe, Topology
from megatron_agentrl.recipe.topology_rules import topology_problems
from megatron_agentrl.trainer import model, optimizer, topology
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.step import forward_logprobs, train_step
from megatron_agentrl.trainer.topology import Rank
from megatron_agentrl.trainer.weights_io import iterate_hf, load_hf

DEADLINE = 600  # seconds that all cells of one world size may take on a busy machine
STEPS = 4

#: Four letters and more, so that four stages have a layer each; sizes that tp = 2 and etp = 2 divide.
MODELS: dict[str, dict[str, Any]] = {
    "Nemotron-H MoE": toy.NEMOTRON,
    "Nemotron-H dense": toy.NEMOTRON | {"hybrid_override_pattern": "M*-M-*"},
    "Qwen3-MoE": toy.QWEN | {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4},
    "DeepSeek-V3 + MTP": mtp_toy.DEEPSEEK,
}

#: Name -> topology. A world of 2 is in the fast tests, larger ones are slow.
LAYOUTS: dict[str, Topology] = {
    "TP2": Topology(world=2, tp=2),
    "TP2+SP": Topology(world=2, tp=2, sequence_parallel=True),
    "PP2": Topology(world=2, pp=2),
    "VPP3xPP2": Topology(world=2, pp=2, vpp=3),
    "EP2 alltoall": Topology(world=2, ep=2),
    "EP2 allgather": Topology(world=2, ep=2, dispatcher=Dispatcher.allgather),
    "DP2 overlap": Topology(world=2, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=2000),
    "DP2 whole optimizer": Topology(world=2, distributed_optimizer=False),
    "CP2": Topology(world=2, cp=2),
    "CP2 packed": Topology(world=2, cp=2),
    "CP2xEP2": Topology(world=2, cp=2, ep=2),
    "TP2xEP2": Topology(world=2, tp=2, sequence_parallel=True, ep=2, etp=1),
    "PP3 uneven": Topology(world=3, pp=3, first_stage_layers=1, last_stage_layers=3),
    "PP2xEP2": Topology(world=4, pp=2, ep=2),
    "PP2xTP2": Topology(world=4, pp=2, tp=2, sequence_parallel=True),
    "EP2xTP2xETP2": Topology(world=4, tp=2, sequence_parallel=True, ep=2, etp=2),
    "VPP3xPP2xEP2 overlap": Topology(
        world=4, pp=2, vpp=3, ep=2, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=2000
    ),
    "PP2xEP2 allgather": Topology(world=4, pp=2, ep=2, dispatcher=Dispatcher.allgather),
    "CP2xTP2 packed": Topology(world=4, cp=2, tp=2, sequence_parallel=True),
}
#: Layouts whose rows are packed; the reference's are padded.
PACKED = {"CP2 packed", "CP2xTP2 packed"}

SGD = Optimizer(name="sgd", lr=0.1, clip_grad=0.0)
ADAM = Optimizer(name="adam", lr=1e-3, clip_grad=1.0, weight_decay=0.01)
#: Rows of each data-parallel rank's micro-batches, lopsided and with empty ones; the reference takes all six at once.
PLANS: dict[int, list[list[tuple[int, ...]]]] = {
    1: [[(5,), (), (0, 1, 2, 3, 4)]],
    2: [[(0, 1, 2, 3), (4,), ()], [(5,), (), ()]],
    4: [[(0, 1), (), ()], [(2,), (3,), ()], [(), (4,), ()], [(5,), (), ()]],
}


@dataclass
class Cell:
    """Largest relative differences from one process; None where the cell cannot be, for `reason`.

    loss, norm  of the first step and the three after it under SGD, and of all four under Adam
    gradient    of any tensor, relative to its largest element, at step 1
    weights     after four SGD steps, alike
    logprobs    of the first rank's first micro-batch after four SGD steps, absolute
    """

    loss: float | None = None
    norm: float | None = None
    adam: float | None = None
    gradient: float | None = None
    weights: float | None = None
    logprobs: float | None = None
    reason: str = ""

    @property
    def worst(self) -> float | None:
        found = [self.loss, self.norm, self.adam, self.gradient, self.weights, self.logprobs]
        return None if self.reason else max(value for value in found if value is not None)


def refusal(layout: str, name: str) -> str:
    """Why `check` refuses the cell; "" where it does not."""
    found = list(topology_problems(LAYOUTS[layout], MODELS[name]))
    if MODELS[name].get("num_nextn_predict_layers") and not found:
        found = list(mtp_problems(recipe(name, LAYOUTS[layout], layout in PACKED), MODELS[name]))
    return "; ".join(found)


# ---- in each process -------------------------------------------------------------------------------------------


def recipe(name: str, sizes: Topology | None = None, packing: bool = False) -> Recipe:
    """Prediction heads are trained where the model has them."""
    made = (mtp_toy if MODELS[name].get("num_nextn_predict_layers") else toy).recipe(sizes)
    made.train.packing = packing
    return made


def build(
    name: str, rank: Rank, opt: Optimizer, sizes: Topology, start: Path, packing: bool = False
) -> tuple[list[Any], Any]:
    chunks = model.build(MODELS[name], recipe(name, sizes, packing), rank)
    if start.exists():
        load_hf(chunks, MODELS[name], start, rank)
    chunks = optimizer.wrap(chunks, opt, recipe(name, sizes))
    return chunks, optimizer.build(chunks, opt)


def gather(chunks: list[Any], name: str, rank: Rank) -> dict[str, torch.Tensor]:
    """The whole checkpoint on rank 0, by the code that publishes weights."""
    tensors = iterate_hf(chunks, MODELS[name], rank, torch.float32)
    return {key: tensor.clone() for key, tensor in tensors if tensor is not None}


def gradient(chunks: list[Any], name: str, rank: Rank) -> dict[str, torch.Tensor]:
    """Gradients take the same way as weights: they are put in their place and back."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    found = gather(chunks, name, rank)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.data.copy_(value)
    return found


def run_cell(
    name: str, rank: Rank, sizes: Topology, plan: list[tuple[int, ...]], start: Path, packing: bool = False
) -> dict[str, Any]:
    """Four SGD steps, then four Adam steps from the same start. Tensors are on rank 0 alone."""
    batches: list[MicroBatch] = [toy.rows(rows) for rows in plan]
    found: dict[str, Any] = {"sgd": [], "adam": []}
    for opt in (SGD, ADAM):
        # Parameters can be gathered late under Adam only: SGD's state is not sharded.
        late = sizes.overlap_param_gather and opt is ADAM
        chunks, made = build(name, rank, opt, replace(sizes, overlap_param_gather=late), start, packing)
        for step in range(1, STEPS + 1):
            result = train_step(chunks, made, batches, toy.negative_logprob, lr=opt.lr, tokens=toy.TOKENS, step=step)
            found[opt.name].append([result.loss, result.grad_norm])
            if opt is SGD and step == 1:
                found["gradient"] = gradient(chunks, name, rank)
        if opt is SGD:
            found["weights"] = gather(chunks, name, rank)
            found["logprobs"] = forward_logprobs(chunks, batches)[0].tolist()  # the first micro-batch's
    return found


def write_starts(shared: Path, rank: Rank) -> None:
    """The weights that every layout starts from, as Hugging Face folders. One process."""
    for name, config in MODELS.items():
        topology.seed_everything(3)
        chunks = model.build(config, recipe(name), rank)
        folder = shared / name
        folder.mkdir()
        tensors = iterate_hf(chunks, config, rank, torch.float32)
        save_file({key: t.clone() for key, t in tensors if t is not None}, folder / "model.safetensors")


def worker(shared: Path, cells: list[str]) -> None:
    """Work through the cells ("layout/model"), which all have this world size; rank 0 leaves the files."""
    present, meetings = "", 0
    for cell in cells:
        layout, name = cell.split("/")
        sizes = LAYOUTS[layout]
        if layout != present:
            if present:
                topology.shutdown()
            processes.meeting(meetings)
            meetings += 1
            rank, present = topology.init(sizes, seed=1, timeout=DEADLINE), layout
        found = run_cell(name, rank, sizes, PLANS[rank.dp_size][rank.dp], shared / name, layout in PACKED)
        if rank.is_first:
            for what in ("gradient", "weights"):
                save_file(found.pop(what), shared / f"{layout}-{name}-{what}")
            (shared / f"{layout}-{name}.json").write_text(json.dumps(found))
    topology.shutdown()


# ---- in the process that judges --------------------------------------------------------------------------------


def reference(shared: Path, rank: Rank) -> dict[str, dict[str, Any]]:
    """What one process finds with one micro-batch, for each model. Also writes the starting weights."""
    write_starts(shared, rank)
    return {name: run_cell(name, rank, Topology(), [tuple(range(6))], shared / name) for name in MODELS}


def start_processes(shared: Path, world: int, cells: list[str]) -> None:
    """Run the cells in `world` processes; their output is the error's text where one fails."""
    processes.run("parity.py", world, shared, "--worker", str(shared), *cells, meetings=len(cells), deadline=DEADLINE)


def cells(world: int) -> list[tuple[str, str]]:
    """(layout, model) of every cell of that many processes."""
    return [(layout, name) for layout, sizes in LAYOUTS.items() if sizes.world == world for name in MODELS]


def run(shared: Path, pairs: list[tuple[str, str]], want: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Cell]:
    """The given cells: one start of processes for each world size, none for those that `check` refuses."""
    found = {pair: Cell(reason=refusal(*pair)) for pair in pairs}
    for world in sorted({LAYOUTS[layout].world for layout, _ in pairs}):
        present = [pair for pair in pairs if LAYOUTS[pair[0]].world == world and not found[pair].reason]
        if present:
            start_processes(shared, world, ["/".join(pair) for pair in present])
        for layout, name in present:
            got = json.loads((shared / f"{layout}-{name}.json").read_text())
            got |= {what: load_file(shared / f"{layout}-{name}-{what}") for what in ("gradient", "weights")}
            found[layout, name] = compare(got, want[name], PLANS[dp_size(LAYOUTS[layout])][0][0])
    return found


def dp_size(sizes: Topology) -> int:
    return sizes.world // (sizes.tp * sizes.pp * sizes.cp)


def compare(got: dict[str, Any], want: dict[str, Any], rows: tuple[int, ...]) -> Cell:
    """`rows` are those of the micro-batch whose logprobs were kept."""

    def gap(what: str, column: int) -> float:
        return max(abs(left[column] / right[column] - 1) for left, right in zip(got[what], want[what], strict=True))

    def tensor_gap(what: str) -> float:
        assert set(got[what]) == set(want[what])
        gaps = []
        for key, value in want[what].items():
            # A gradient that is 0 throughout must be 0 here too.
            gaps.append(float((got[what][key] - value).abs().max()) / (float(value.abs().max()) or 1.0))
        return max(gaps)

    logprobs = torch.tensor(got["logprobs"])
    return Cell(
        loss=gap("sgd", 0),
        norm=gap("sgd", 1),
        adam=max(gap("adam", 0), gap("adam", 1)),
        gradient=tensor_gap("gradient"),
        weights=tensor_gap("weights"),
        logprobs=float((logprobs - torch.tensor(want["logprobs"])[list(rows), : logprobs.shape[1]]).abs().max()),
    )


def table(found: dict[tuple[str, str], Cell]) -> str:
    """Markdown: a row a layout, a column a model, the largest difference in each cell; then the reasons."""
    names = list(dict.fromkeys(name for _, name in found))
    lines = ["| layout | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    reasons: list[str] = []
    for layout in dict.fromkeys(layout for layout, _ in found):
        row = []
        for name in names:
            cell = found.get((layout, name))
            if cell is None:
                row.append("")
                continue
            if cell.reason and cell.reason not in reasons:
                reasons.append(cell.reason)
            row.append(f"refused ({reasons.index(cell.reason) + 1})" if cell.reason else f"{cell.worst:.0e}")
        lines.append(f"| {layout} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))])


def main() -> None:
    import tempfile

    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3:])
        return
    worlds = [int(world) for world in sys.argv[2].split(",")] if sys.argv[1:2] == ["--worlds"] else [2, 3, 4]
    with tempfile.TemporaryDirectory() as folder:
        rank = topology.init(Topology(), seed=1, timeout=60)
        want = reference(Path(folder), rank)
        print(table(run(Path(folder), [pair for world in worlds for pair in cells(world)], want)))
        topology.shutdown()


if __name__ == "__main__":
    main()
