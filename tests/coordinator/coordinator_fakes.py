"""A run without model, agent or trainer: recipe, prompts and receipts as the coordinator sees them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec

from megatron_agentrl.coordinator.batch_plan import Plan
from megatron_agentrl.coordinator.ledger import Ledger
from megatron_agentrl.coordinator.service import Coordinator
from megatron_agentrl.data.prompts import Prompt, PromptSets
from megatron_agentrl.data.stream import Stream
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.trajectory.types import Receipt, Where

_rollouts = itertools.count()


class Clock:
    """Monotonic seconds that only move when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def recipe(batch: int = 2, group_size: int = 2, eta: int = 1, steps: int = 1000, **data: Any) -> Recipe:
    made = Recipe()
    made.train.batch, made.train.steps = batch, steps
    made.algorithm.group_size = group_size
    made.staleness.eta = eta
    made.data.shuffle = False
    made.agent.timeout = 10.0
    for name, value in data.items():
        setattr(made.data, name, value)
    return made


def prompts(size: int, held_out: int = 0) -> PromptSets:
    def ask(name: str) -> Prompt:
        return Prompt(name, [{"role": "user", "content": name}], name)

    return PromptSets([ask(f"p{i}") for i in range(size)], [ask(f"h{i}") for i in range(held_out)])


def start(path: Path, made: Recipe, sets: PromptSets, clock: Clock | None = None, **extra: Any) -> Coordinator:
    """A coordinator over the ledger in `path` (a new one, or one that an earlier coordinator left)."""
    clock = clock or Clock()
    stream = Stream(len(sets.train), made.seed, made.data.shuffle, made.data.epochs)
    return Coordinator(made, Ledger(path / "ledger.sqlite", stream, "prompts", clock), sets, clock, **extra)


def receipt(
    task_id: str,
    sample: int = 0,
    sampled: dict[int, int] | None = None,
    reward: float | None = None,
    status: str = "ok",
    message: str = "",
    lengths: list[int] | None = None,
    engine: str = "engine-0",
    where: Where | None = None,
    **metrics: float,
) -> Receipt:
    sampled = {0: 4} if sampled is None else sampled
    if reward is None and status == "ok":
        reward = float(sample % 2)
    return Receipt(
        rollout_id=f"r{next(_rollouts)}",
        task_id=task_id,
        sample=sample,
        status=status,
        reward=reward,
        engine=engine,
        lengths=[6 + sum(sampled.values())] if lengths is None else lengths,
        sampled=sampled,
        where=where or Where("spool/0.spool", 0, 0, 0),
        metrics=metrics,
        message=message,
    )


def plan_of(coordinator: Coordinator, step: int) -> Plan | None:
    """The plan of `step`, None unless it is ready."""
    reply = coordinator.batch(step)
    return None if reply.plan is None else msgspec.json.decode(reply.plan, type=Plan)


def prompts_of(plan: Plan) -> list[int]:
    """Stream positions of a plan's groups: t000012 and t000012.1 are 12."""
    return [int(group.task_id[1:7]) for group in plan.groups]


def answer_all(coordinator: Coordinator, version: int, room: int = 1000, worker: str = "worker-0") -> list[str]:
    """Takes all work there is and answers it at once with tokens of `version`; the task ids answered."""
    answered = []
    for work in coordinator.work(worker, room):
        answered.append(work.task_id)
        coordinator.receipts([receipt(work.task_id, sample, {version: 4}) for sample in work.samples])
    return answered
