"""Rewards by rule: what an answer is worth, decided without a model. Pure functions of texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from megatron_agentrl.agent.types import Task

#: Key of `Task.metadata` that holds a reasoning-gym task's name and entry.
REASONING_GYM = "reasoning_gym"


class UnscorableTask(ValueError):
    """The task lacks what its reward needs. Raised before a score is given, so it never becomes a reward of 0."""


def exact_match(content: str | None, answer: str) -> float:
    """1.0 if the content is the answer, character by character, else 0.0."""
    return float(content == answer)


def score(task: Task, content: str | None) -> float:
    """The reward of a final answer: by the task's reasoning-gym scorer if it names one, else by exact match.

    White space around the answer does not count. Raises UnscorableTask where the task has neither.
    """
    content = (content or "").strip()
    if REASONING_GYM in task.metadata:
        source = task.metadata[REASONING_GYM]
        return float(_reasoning_gym_scorer(source["task"])(answer=content or None, entry=source["entry"]))
    if task.answer is None:
        raise UnscorableTask(f"task {task.task_id} has no answer to compare with; give the data file an `answer`")
    return exact_match(content, task.answer.strip())


@cache
def _reasoning_gym_scorer(name: str) -> Callable[..., Any]:
    # Imported on use: the package draws in a hundred task modules, which only such runs need.
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)
