"""Run as two processes by test_trainer_parallel: every two-process case of a set, one start.

argv: shared folder, then the layouts. Leaves `results-{first layout}-{rank}.json` and weight
checkpoints in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_agentrl.cpu import megatron

megatron.install()

import processes  # noqa: E402
import trainer_toy as toy  # noqa: E402
from trainer_theta import theta_cases  # noqa: E402

from megatron_agentrl.recipe.schema import Topology  # noqa: E402
from megatron_agentrl.trainer import checkpoint, optimizer, topology  # noqa: E402
from megatron_agentrl.trainer.step import forward_logprobs, train_step  # noqa: E402

LAYOUTS = {
    "dp2": Topology(world=2),
    "ep2": Topology(world=2, ep=2),
}
#: Data-parallel rank -> micro-batches of rows. The second form is lopsided and has an empty micro-batch.
EVEN = {0: [(0, 1), (2,)], 1: [(3,), (4, 5)]}
LOPSIDED = {0: [(0, 1, 2, 3), (4,)], 1: [(5,), ()]}
WHOLE = {"even": [(0, 1), (2, 3), (4, 5)], "lopsided": [(5,), (), (0, 1, 2, 3, 4)]}  # one data-parallel rank


def gradients(shared: Path, layout: str, name: str, rank: topology.Rank, topo: Topology) -> dict:
    """Step-1 loss and norm for both groupings, the gradients, the weights after 4 SGD steps (as checkpoints)."""
    found: dict = {}
    for grouping, plan in (("even", EVEN), ("lopsided", LOPSIDED)):
        batches = [toy.rows(rows) for rows in (plan[rank.dp] if rank.dp_size == 2 else WHOLE[grouping])]
        chunks, opt = toy.build(name, rank, toy.SGD, topo)
        checkpoint.load_weights(shared / f"start-{name}", chunks)
        for step in range(1, 5):
            result = train_step(chunks, opt, batches, toy.negative_logprob, lr=0.1, tokens=toy.TOKENS, step=step)
            found.setdefault(grouping, []).append([result.loss, result.grad_norm, result.metrics["tokens"]])
            if step == 1 and grouping == "lopsided":
                kept = [parameter.detach().clone() for parameter in chunks[0].parameters()]
                for parameter in chunks[0].parameters():
                    parameter.data.copy_(parameter.main_grad)
                checkpoint.save_weights(shared / f"gradient-{layout}-{name}", chunks)
                for parameter, value in zip(chunks[0].parameters(), kept, strict=True):
                    parameter.data.copy_(value)
        if grouping == "lopsided":
            checkpoint.save_weights(shared / f"end-{layout}-{name}", chunks)
            found["logprobs"] = forward_logprobs(chunks, batches)[0].tolist()
    return found


def resumed(shared: Path, name: str, rank: topology.Rank, topo: Topology) -> dict:
    """Adam: steps 3 and 4 after a checkpoint of two processes, and of one; and the uninterrupted run's."""
    batches = [toy.rows(rows) for rows in LOPSIDED[rank.dp]]

    def steps(chunks, opt, first: int, last: int) -> list[float]:
        return [
            train_step(chunks, opt, batches, toy.negative_logprob, lr=1e-2, tokens=toy.TOKENS, step=step).loss
            for step in range(first, last)
        ]

    chunks, opt = toy.build(name, rank, toy.ADAM, topo)
    steps(chunks, opt, 1, 3)
    folder = checkpoint.save(shared / "two", chunks, opt, 2, {"rank": rank.rank})
    whole = steps(chunks, opt, 3, 6)
    chunks, opt = toy.build(name, rank, toy.ADAM, topo)
    extra = checkpoint.load(folder, chunks, opt)
    again = steps(chunks, opt, 3, 6)
    chunks, opt = toy.build(name, rank, toy.ADAM, topo)
    checkpoint.load(shared / "one" / "step_2", chunks, opt)
    from_one = steps(chunks, opt, 3, 6)
    biases = [router.expert_bias.tolist() for router in optimizer.routers(chunks)]
    return {"whole": whole, "again": again, "from_one": from_one, "extra": extra, "biases": biases}


def main() -> None:
    shared, layouts = Path(sys.argv[1]), sys.argv[2:]
    found: dict = {}
    for number, layout in enumerate(layouts):
        processes.meeting(number)
        rank = topology.init(LAYOUTS[layout], seed=1, timeout=60)
        found[layout] = {"rank": vars(rank)}
        for name in toy.MODELS:
            found[layout][name] = gradients(shared, layout, name, rank, LAYOUTS[layout])
        if layout == "dp2":
            found["theta"] = theta_cases(rank)
        if layout == "ep2":
            found["resumed"] = resumed(shared, "nemotron", rank, LAYOUTS[layout])
        topology.shutdown()
    (shared / f"results-{layouts[0]}-{rank.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
