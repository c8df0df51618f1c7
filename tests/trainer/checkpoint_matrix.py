"""Every checkpoint at every layout: what is saved at one topology and loaded at another, tensor by tensor.

State is judged by another way than it was saved by: each moment (and the step count, spread over its parameter) is put
in the place of the weights and gathered to whole Hugging Face tensors by the code that publishes weights. All
checkpoints are written first, then all are read, with one start of processes for each world size and direction.

    python tests/trainer/checkpoint_matrix.py     prints the table of the whole matrix
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from megatron_agentrl.cpu import megatron

    megatron.install()

import parity
import processes
import torch
import trainer_toy as toy
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import checkpoint, optimizer, topology
from megatron_agentrl.trainer.data_parallel import settle
from megatron_agentrl.trainer.step import train_step
from megatron_agentrl.trainer.topology import Rank

HERE = Path(__file__)
HYBRID, QWEN, DEEPSEEK = "Nemotron-H MoE", "Qwen3-MoE", "DeepSeek-V3 + MTP"
#: The two data-parallel ones cut their buffers into many buckets, or keep the state whole on each rank. In DP4xEP2 the
#: state of experts is cut over two ranks and all other over four.
LAYOUTS: dict[str, Topology] = {
    "one": Topology(),
    "DP2": Topology(world=2, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=2000),
    "EP2": Topology(world=2, ep=2),
    "TP2+SP": Topology(world=2, tp=2, sequence_parallel=True),
    "PP2": Topology(world=2, pp=2),
    "VPP3xPP2": Topology(world=2, pp=2, vpp=3),
    "DP2 whole": Topology(world=2, distributed_optimizer=False),
    "TP2xEP2": Topology(world=2, tp=2, sequence_parallel=True, ep=2, etp=1),
    "PP2xEP2": Topology(world=4, pp=2, ep=2),
    "DP4xEP2": Topology(world=4, ep=2),
}
SIX = ("one", "DP2", "EP2", "TP2+SP", "PP2", "VPP3xPP2")
#: (saved at, loaded at): each of the six at each; each once on either side; and the layouts beside the six.
PAIRS = list(itertools.product(SIX, SIX))
ROUND = list(zip(SIX, SIX[1:] + SIX[:1], strict=True))
BESIDE = [
    ("one", "DP2 whole"),
    ("DP2 whole", "TP2xEP2"),
    ("TP2xEP2", "PP2xEP2"),
    ("PP2xEP2", "DP4xEP2"),
    ("DP4xEP2", "one"),
    ("DP2", "PP2xEP2"),
]
Cells = dict[str, list[tuple[str, str]]]
WHOLE: Cells = {HYBRID: PAIRS + BESIDE, QWEN: PAIRS + BESIDE, DEEPSEEK: ROUND + BESIDE}
SAVED_AT, FURTHER = 3, 3  # steps before the save and after it
DEADLINE = 1800  # seconds that one world size may take in one direction, on a busy machine
STATE = ("exp_avg", "exp_avg_sq", "step")


# ---- in each process -------------------------------------------------------------------------------------------


def steps(chunks: list[Any], opt: Any, rank: Rank, first: int, count: int) -> list[float]:
    """Losses of Adam steps, which also move the routers' biases."""
    batches = [toy.rows(rows) for rows in parity.PLANS[rank.dp_size][rank.dp]]
    return [
        train_step(chunks, opt, batches, toy.negative_logprob, lr=toy.ADAM.lr, tokens=toy.TOKENS, step=step).loss
        for step in range(first, first + count)
    ]


def whole_state(chunks: list[Any], opt: Any, name: str, rank: Rank) -> dict[str, torch.Tensor]:
    """Weights, biases, both moments and step counts as whole tensors of the Hugging Face names; on rank 0 alone."""
    settle(chunks)
    found = {f"weights/{key}": value for key, value in parity.gather(chunks, name, rank).items()}
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    for what in STATE:
        with torch.no_grad():
            values = [_local_state(parameter, opt, what) for parameter in parameters]
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data.copy_(value)
            for key, value in parity.gather(chunks, name, rank).items():
                if not key.endswith("e_score_correction_bias"):  # a buffer, which has no such state
                    found[f"{what}/{key}"] = value
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.data.copy_(value)
    return found


def _local_state(parameter: torch.Tensor, opt: Any, what: str) -> torch.Tensor:
    """One kind of state in the parameter's own shape; shards are added up, so that one held twice shows. Collective."""
    whole = torch.zeros(parameter.numel())
    for part in optimizer.parts(opt):
        if not isinstance(part, DistributedOptimizer):
            if parameter in part.optimizer.state:
                return part.optimizer.state[parameter][what].expand(parameter.shape).clone()
        elif parameter in part.model_param_group_index_map:
            group, position = part.model_param_group_index_map[parameter]
            state = part.optimizer.state[part.optimizer.param_groups[group]["params"][position]]
            held = part._get_model_param_range_map(parameter)["param"]
            whole[held.start : held.end] += state[what]
    expert = not getattr(parameter, "allreduce", True)
    torch.distributed.all_reduce(
        whole,
        group=parallel_state.get_expert_data_parallel_group()
        if expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    return whole.view(parameter.shape)


def write(shared: Path, layout: str, name: str, rank: Rank) -> None:
    """Train, save, and leave the whole state at the save and the losses of the steps after it."""
    chunks, opt = parity.build(name, rank, toy.ADAM, LAYOUTS[layout], shared / name)
    steps(chunks, opt, rank, 1, SAVED_AT)
    state = whole_state(chunks, opt, name, rank)
    checkpoint.save(shared / f"{layout}-{name}", chunks, opt, SAVED_AT, {"layout": layout})
    losses = steps(chunks, opt, rank, SAVED_AT + 1, FURTHER)
    if rank.is_first:
        save_file(state, shared / f"{layout}-{name}.safetensors")
        (shared / f"{layout}-{name}.json").write_text(json.dumps(losses))


def read(shared: Path, source: str, layout: str, name: str, rank: Rank) -> None:
    """Load into a fresh model with weights and state of its own; leave what differs and the losses that follow."""
    topology.seed_everything(9)
    chunks, opt = parity.build(name, rank, toy.ADAM, LAYOUTS[layout], shared / "no weights")
    fresh = get_cuda_rng_tracker().get_states()
    extra = checkpoint.load(shared / f"{source}-{name}" / f"step_{SAVED_AT}", chunks, opt)
    assert extra == {"layout": source}
    restored = any(not torch.equal(fresh[key], value) for key, value in get_cuda_rng_tracker().get_states().items())
    state = whole_state(chunks, opt, name, rank)
    losses = steps(chunks, opt, rank, SAVED_AT + 1, FURTHER)
    if rank.is_first:
        want = load_file(shared / f"{source}-{name}.safetensors")
        different = sorted(set(want) ^ set(state)) + [
            key for key, value in want.items() if key in state and not torch.equal(value, state[key])
        ]
        found = {"different": different, "losses": losses, "random_state_restored": restored}
        states = [state for part in optimizer.parts(opt) for state in part.optimizer.state.values()]
        found["steps"] = sorted({float(state["step"]) for state in states})
        (shared / f"{source}-{layout}-{name}.json").write_text(json.dumps(found))


def work(shared: Path, tasks: list[list[str]], rank: Rank | None = None) -> None:
    """Tasks: [model, layout] to write, [model, layout, source] to read. `rank`: this process is in that world."""
    present, meetings = "", 0
    for name, layout, *source in tasks:
        if rank is None or (present and layout != present):
            if present:
                topology.shutdown()
            processes.meeting(meetings)
            meetings += 1
            rank = topology.init(LAYOUTS[layout], seed=1, timeout=DEADLINE)
        present = layout
        if source:
            read(shared, source[0], layout, name, rank)
        else:
            write(shared, layout, name, rank)


# ---- in the process that judges --------------------------------------------------------------------------------


def run(shared: Path, alone: Rank, cells: Cells) -> dict[tuple[str, str, str], Any]:
    """(saved at, loaded at, model) -> what was found, for each model's pairs of layouts."""
    parity.write_starts(shared, alone)
    order = list(LAYOUTS)
    writes = [[name, source] for name, pairs in cells.items() for source in {source for source, _ in pairs}]
    reads = [[name, target, source] for name, pairs in cells.items() for source, target in pairs]
    for tasks in (writes, reads):
        for world in sorted({LAYOUTS[layout].world for _, layout, *_ in tasks}):
            own = [task for task in tasks if LAYOUTS[task[1]].world == world]
            own.sort(key=lambda task: order.index(task[1]))  # one process group for each layout
            if world == 1:
                work(shared, own, alone)
            else:
                arguments, meetings = ("--worker", str(shared), json.dumps(own)), len({layout for _, layout, *_ in own})
                processes.run(HERE.name, world, shared, *arguments, meetings=meetings, deadline=DEADLINE)
    found = {}
    for name, target, source in reads:
        want = json.loads((shared / f"{source}-{name}.json").read_text())
        cell = json.loads((shared / f"{source}-{target}-{name}.json").read_text())
        cell["gap"] = max(abs(a / b - 1) for a, b in zip(cell["losses"], want, strict=True))
        found[source, target, name] = cell
    return found


def table(found: dict[tuple[str, str, str], dict[str, Any]]) -> str:
    """Markdown: saved at (rows), loaded at (columns): largest relative difference of the next losses over the models."""
    layouts = [layout for layout in LAYOUTS if any(layout in pair[:2] for pair in found)]
    lines = ["| saved at \\ loaded at | " + " | ".join(layouts) + " |", "| --- |" + " --- |" * len(layouts)]
    for source in layouts:
        row = []
        for layout in layouts:
            cells = [cell for (a, b, _), cell in found.items() if (a, b) == (source, layout)]
            if not cells:
                row.append("")
                continue
            differ = sum(len(cell["different"]) for cell in cells)
            row.append(f"{differ} differ" if differ else f"{max(cell['gap'] for cell in cells):.0e}")
        lines.append(f"| {source} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    import tempfile

    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), json.loads(sys.argv[3]))
        topology.shutdown()
        return
    with tempfile.TemporaryDirectory() as folder:
        rank = topology.init(Topology(), seed=1, timeout=60)
        print(table(run(Path(folder), rank, WHOLE)))
        topology.shutdown()


if __name__ == "__main__":
    main()
