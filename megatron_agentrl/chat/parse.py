"""Sampled text → assistant message, by the `response_template` of the model folder.

`response_template` (in tokenizer_config.json) is Hugging Face's declarative inverse of a chat
template: named regions with opening and closing marks, each with a parser for what lies between.
This module reads a whole turn at once; it gives the message that transformers' `parse_response`
gives, with one addition: a turn that cannot be parsed is never an error. It becomes plain content
plus `parse_failure`, since a policy must be able to learn from its own bad output.

The message is for the agent. Training and the next prompt follow the sampled ids, not this.
"""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any

from megatron_agentrl.chat.regions import ResponseTemplate
from megatron_agentrl.chat.tokenizer import Tokenizer

log = logging.getLogger(__name__)

#: Names under which models' templates keep reasoning; the wire calls it reasoning_content.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class ToolCall:
    """One call as it goes over the wire: `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """One parsed turn.

    content, tool_calls, reasoning   what the agent sees
    parse_failure                    why the turn could not be parsed (content is then the raw text)
    message                          the same turn as the chat template expects it (arguments as objects)
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    parse_failure: str | None = None
    message: dict[str, Any] = field(default_factory=dict)

    def wire(self) -> dict[str, Any]:
        """The OpenAI assistant message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.parse_failure is not None:
            message["parse_failure"] = self.parse_failure
        return message


class ReplyParser:
    """Parses the turns of one model. Without a response template every turn is plain content."""

    def __init__(self, tokenizer: Tokenizer, response_template: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        spec = response_template or tokenizer.config.get("response_template")
        if spec is None and "response_schema" in tokenizer.config:
            log.warning(
                "%s has the older `response_schema`, which transformers no longer reads: turns are plain content. "
                "Give tokenizer_config.json a `response_template` to get tool calls and reasoning.",
                tokenizer.folder,
            )
        self._template = ResponseTemplate(spec) if spec else None

    def parse(
        self, prompt: str, sampled: str, ids: list[int], tools: list[dict[str, Any]] | None = None
    ) -> Reply:
        """The message in `sampled`, the text of `ids` with special tokens kept, that followed `prompt`."""
        raw = sampled
        if ids and ids[-1] in self._tokenizer.stop_ids:
            raw = self._tokenizer.decode(ids[:-1])
        if self._template is None:
            content = self._tokenizer.decode(ids, skip_special=True)
            return Reply(content, message={"role": "assistant", "content": content})
        try:
            fields, cut = self._template.parse(prompt, sampled, tools)
            if "tool_calls" in cut:
                raise ValueError("the tool call was cut off before its end mark")
            return _reply(fields, raw)
        # KeyError: a value that the transform names and the sampled text lacks; ValueError and TypeError: text that is
        # not what a region's parser expects; RecursionError: JSON nested too deep. All are the model's output.
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            reason = str(error.args[0] if isinstance(error, KeyError) else error) or type(error).__name__
            return Reply(raw, parse_failure=reason, message={"role": "assistant", "content": raw})


def _reply(fields: dict[str, Any], raw: str) -> Reply:
    """Turns the regions' values into a Reply; raises ValueError where they are no assistant message."""
    content = fields.get("content")
    if content is not None and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    reasoning = next((fields[key] for key in REASONING_KEYS if fields.get(key)), None)
    calls, objects = [], []
    for call in _flat(fields.get("tool_calls") or []):
        name, arguments = _function(call)
        # allow_nan=False and the encoding below: what is no JSON or no UTF-8 cannot go over the wire.
        made = ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        calls.append(made)
        objects.append({"id": made.id, "type": "function", "function": {"name": name, "arguments": arguments}})
    if not content and not calls and not reasoning and raw.strip():
        raise ValueError("neither content nor a tool call found in the sampled text")
    if content is None and not calls:
        content = ""
    message: dict[str, Any] = {"role": "assistant", "content": "", **fields}
    if objects:
        message["tool_calls"] = objects
    reply = Reply(content, tuple(calls), reasoning, message=message)
    json.dumps(reply.wire(), ensure_ascii=False).encode("utf-8")
    return reply


def _flat(calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        return [calls]
    return [call for item in calls for call in (item if isinstance(item, list) else [item])]


def _function(call: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a parsed tool call; raises ValueError where it is none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("the tool call has no function name")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"the tool call's arguments are {type(arguments).__name__}; a JSON object was expected")
    return function["name"], arguments
