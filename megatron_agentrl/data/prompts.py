"""Prompts: what the policy is asked, and what a reward needs to judge the answer.

A source gives two sets, training and held-out, that share no prompt. Order and repetition are
`data.stream`'s; sampling settings are the recipe's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_agentrl.data.jsonl import check_messages, kind, read_objects
from megatron_agentrl.data.types import Prompt, PromptSets
from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.schema import Recipe, Source

_canonical = msgspec.json.Encoder(order="deterministic").encode


def load_prompts(recipe: Recipe) -> PromptSets:
    """Training and held-out prompts of `recipe.data`, checked against one another; RecipeError on bad input."""
    data = recipe.data
    if data.source is Source.reasoning_gym:
        # Imported here: the package draws in a hundred task modules, and a JSONL run needs none of them.
        from megatron_agentrl.data.reasoning_gym import draw

        if data.task is None:
            raise RecipeError("data.source=reasoning_gym needs data.task, e.g. data.task=chain_sum")
        return draw(data.task, data.size, data.eval_size, recipe.seed, data.task_options)
    if data.prompts is None:
        raise RecipeError("data.source=jsonl needs data.prompts, the path of a JSONL file")
    train = read_prompts(data.prompts)
    held_out = read_prompts(data.eval) if data.eval is not None else []
    check_disjoint(train, held_out, data.prompts, data.eval or "")
    return PromptSets(train, held_out)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a JSONL file (`.gz` is unpacked): `prompt` (text) or `messages`, `answer`, an optional `id`.

    Any other key goes to `metadata`. A line without `id` is named after its number (`line-12`). An answer may be
    text or a whole number, which is kept as its text.
    """
    prompts = []
    lines: dict[str, int] = {}
    for number, record in read_objects(path):
        prompt = _prompt(record, number, f"{path}:{number}")
        if (first := lines.setdefault(prompt.prompt_id, number)) != number:
            raise RecipeError(f"{path}:{number}: id {prompt.prompt_id!r} is already line {first}'s; ids must differ")
        prompts.append(prompt)
    return prompts


def check_disjoint(train: Sequence[Prompt], held_out: Sequence[Prompt], train_name: str, held_out_name: str) -> None:
    """Raises RecipeError on the first held-out prompt whose messages are also a training prompt's."""
    asked = {_canonical(prompt.messages): prompt.prompt_id for prompt in train}
    for prompt in held_out:
        if (other := asked.get(_canonical(prompt.messages))) is not None:
            raise RecipeError(
                f"{held_out_name}: {prompt.prompt_id} is also a training prompt ({other} of {train_name}): "
                f"{_excerpt(prompt)}; take it out of one of the two files"
            )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hex digest of ids and messages in order: two runs with one fingerprint index the same prompts."""
    from hashlib import blake2b

    digest = blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(_canonical([prompt.prompt_id, prompt.messages, prompt.answer]))
    return digest.hexdigest()


def _prompt(record: dict[str, Any], number: int, at: str) -> Prompt:
    text, messages = record.pop("prompt", None), record.pop("messages", None)
    if (text is None) == (messages is None):
        found = "both prompt and messages" if text is not None else "neither prompt nor messages"
        raise RecipeError(f"{at}: has {found}; give one of them")
    if text is not None:
        if not isinstance(text, str) or not text:
            raise RecipeError(f"{at}: prompt is {kind(text)}, expected text (a list of messages goes under messages)")
        messages = [{"role": "user", "content": text}]
    answer = record.pop("answer", None)
    if isinstance(answer, int) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is not None and not isinstance(answer, str):
        raise RecipeError(f"{at}: answer is {kind(answer)}, expected text; write it in quotes")
    name = record.pop("id", f"line-{number}")
    if not isinstance(name, (str, int)) or isinstance(name, bool) or name == "":
        raise RecipeError(f"{at}: id is {kind(name)}, expected text")
    return Prompt(str(name), check_messages(messages, at), answer, record)


def _excerpt(prompt: Prompt, most: int = 60) -> str:
    text = str(prompt.messages[-1].get("content"))
    return repr(text if len(text) <= most else text[:most] + "…")
