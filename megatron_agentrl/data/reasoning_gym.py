"""Prompts drawn from a reasoning-gym task.

The held-out set comes from another seed and is drawn until it has its size without a question that is also
asked in training. `metadata["reasoning_gym"]` carries what the task's own scorer needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from megatron_agentrl.data.types import Prompt, PromptSets
from megatron_agentrl.recipe.errors import RecipeError, did_you_mean

#: Added to the run's seed for the held-out draw. Any constant does; it only has to stay the same.
_HELD_OUT = 1_000_003
#: Held-out questions to look at per one that is wanted, before the task counts as too small.
_PATIENCE = 8


def draw(task: str, size: int, held_out_size: int, seed: int) -> PromptSets:
    """`size` training and `held_out_size` held-out prompts of `task`, a pure function of the arguments.

    Raises RecipeError for an unknown task and for one that has too few different questions.
    """
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise RecipeError(f"data.task={task}: no such reasoning-gym task; {did_you_mean(task, DATASETS)}")
    if size < 1:
        raise RecipeError(f"data.size={size}: expected at least 1 training prompt")
    train = list(_entries(task, size, seed, "rg"))
    if not held_out_size:
        return PromptSets(train, [])
    asked = {prompt.messages[0]["content"] for prompt in train}
    held_out: list[Prompt] = []
    for prompt in _entries(task, held_out_size * _PATIENCE, seed + _HELD_OUT, "rg-eval"):
        question = prompt.messages[0]["content"]
        if question not in asked:
            asked.add(question)
            held_out.append(prompt)
            if len(held_out) == held_out_size:
                return PromptSets(train, held_out)
    raise RecipeError(
        f"data.task={task}: only {len(held_out)} of {held_out_size} held-out questions are not also training "
        f"questions; lower data.size or data.eval_size"
    )


def _entries(task: str, size: int, seed: int, prefix: str) -> Iterator[Prompt]:
    """Drawn as they are asked for: a task may take long over a question."""
    import reasoning_gym

    for index, entry in enumerate(reasoning_gym.create_dataset(task, size=size, seed=seed)):
        # Through JSON and back: the entry travels to the workers as JSON, and must look the same before it does.
        plain = msgspec.json.decode(msgspec.json.encode(entry, enc_hook=_plain))
        answer = plain.get("answer")
        yield Prompt(
            f"{prefix}-{index}",
            [{"role": "user", "content": plain["question"]}],
            None if answer is None else str(answer),
            {"reasoning_gym": {"task": task, "entry": plain}},
        )


def _plain(value: object) -> object:
    """What msgspec cannot write: numpy scalars, fractions, symbolic expressions."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
