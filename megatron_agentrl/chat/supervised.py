"""Demonstration → ids and mask: the supervised side of the chat template.

The assistant's part of each turn is found by rendering, turn by turn, the way a session would meet
it: what the template writes before the turn is context, what it writes for the turn itself is
trained. Not used for sampled trajectories: their ids come from the engine.
"""

from __future__ import annotations

from typing import Any

from megatron_agentrl.chat.template import ChatTemplate, TemplateError, template_messages
from megatron_agentrl.chat.tokenizer import Tokenizer


def encode_demonstration(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    tokenizer: Tokenizer,
) -> tuple[list[int], list[int]]:
    """(ids_T, mask_T): mask is 1 on the tokens an assistant would have sampled, its stop token included.

    Text that the template writes after a turn's last stop token (a newline, say) is context. Raises
    TemplateError where the template rewrites earlier turns when later ones follow (as templates that
    drop old reasoning do): such a demonstration is not one token sequence.
    """
    shaped = template_messages(messages)
    if not any(message.get("role") == "assistant" for message in shaped):
        raise TemplateError("the demonstration has no assistant message, so nothing of it can be trained on")
    full = template.render(shaped, tools)
    stop_tokens = [token for token, id in tokenizer.special_tokens.items() if id in tokenizer.stop_ids]
    ids: list[int] = []
    mask: list[int] = []
    done = 0
    for index, message in enumerate(shaped):
        if message.get("role") != "assistant":
            continue
        before = template.render(shaped[:index], tools, add_generation_prompt=True)
        after = full if index + 1 == len(shaped) else template.render(shaped[: index + 1], tools)
        if not (full.startswith(after) and after.startswith(before) and len(before) >= done):
            raise TemplateError(
                f"the chat template writes message {index} differently when other messages follow it; "
                "split the demonstration so that this assistant message is its last"
            )
        stop = max((after.rfind(token, len(before)) + len(token) for token in stop_tokens if token in after[len(before) :]), default=0)
        turn_end = stop or len(after)
        for text, trained in ((full[done : len(before)], 0), (full[len(before) : turn_end], 1)):
            piece = tokenizer.encode(text)
            ids += piece
            mask += [trained] * len(piece)
        done = turn_end
    rest = tokenizer.encode(full[done:])
    return ids + rest, mask + [0] * len(rest)
