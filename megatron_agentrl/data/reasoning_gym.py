"""Prompts drawn from a reasoning-gym task.

The held-out set comes from another seed and is drawn until it has its size without a question that is also
asked in training. `metadata["reasoning_gym"]` carries what the task's own scorer needs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from megatron_agentrl.data.types import Prompt, PromptSets
from megatron_agentrl.recipe.errors import RecipeError, did_you_mean

#: Added to the run's seed for the held-out draw. Any constant does; it only has to stay the same.
_HELD_OUT = 1_000_003
#: Held-out questions to look at per one that is wanted, before the task counts as too small.
_PATIENCE = 8


def check_task(task: str, options: str | None) -> dict[str, Any]:
    """The settings that `options` asks for (`min_terms=2,max_terms=2`), as the task's own validation accepts them.

    Raises RecipeError for an unknown task or setting and for values that the task refuses.
    """
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise RecipeError(f"data.task={task}: no such reasoning-gym task; {did_you_mean(task, DATASETS)}")
    config_class = DATASETS[task][1]
    names = [field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")]
    chosen: dict[str, Any] = {}
    # A comma separates settings only before the next name: a value may be a list.
    for pair in re.split(r",(?=\s*\w+=)", options) if options else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise RecipeError(f"data.task_options: found {pair.strip()!r}, expected name=value,name=value")
        if name in chosen:
            raise RecipeError(f"data.task_options: {name} is given twice; give it once")
        if name not in names:
            raise RecipeError(f"data.task_options: {task} has no setting {name}; {did_you_mean(name, names)}")
        chosen[name] = _value(name, value)
    try:
        config_class(**chosen, seed=0, size=1).validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise RecipeError(f"data.task_options={options}: {task} refuses it ({error}); change the values") from error
    return chosen


def _value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(
            f"data.task_options: {name}={text}: expected a number, true, false, text or [list]"
        ) from error


def draw(task: str, size: int, held_out_size: int, seed: int, options: str | None = None) -> PromptSets:
    """`size` training and `held_out_size` held-out prompts of `task`, a pure function of the arguments.

    Raises RecipeError as `check_task` does, and for a task that has too few different questions.
    """
    chosen = check_task(task, options)
    if size < 1:
        raise RecipeError(f"data.size={size}: expected at least 1 training prompt")
    train = list(_entries(task, chosen, size, seed, "rg"))
    if not held_out_size:
        return PromptSets(train, [])
    asked = {prompt.messages[0]["content"] for prompt in train}
    held_out: list[Prompt] = []
    for prompt in _entries(task, chosen, held_out_size * _PATIENCE, seed + _HELD_OUT, "rg-eval"):
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


def _entries(task: str, options: dict[str, Any], size: int, seed: int, prefix: str) -> Iterator[Prompt]:
    """Drawn as they are asked for: a task may take long over a question."""
    import reasoning_gym

    for index, entry in enumerate(reasoning_gym.create_dataset(task, size=size, seed=seed, **options)):
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
