"""A model folder's chat template: messages → prompt text, exactly as the model's authors wrote it.

The template is third-party code, so it runs in Jinja's sandbox, under a time limit that is checked
on every loop iteration and macro call, and may not repeat text without bound. Not a tokenizer, and not a
judge of messages: what a template refuses (`raise_exception`) becomes a TemplateError.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from megatron_agentrl.chat.tokenizer import read_json

#: Longest text a template may build with `*`, in characters.
MAX_REPEAT = 1 << 20


class TemplateError(ValueError):
    """The chat template is missing, refused the messages, failed, or took too long."""


class ChatTemplate:
    """Renders conversations with one Jinja template.

    source    the template's text
    specials  names the template may use for special tokens (bos_token, eos_token, …)
    limit     CPU seconds one rendering may take (a machine that is busy elsewhere is not the template's fault)
    """

    def __init__(self, source: str, specials: dict[str, str] | None = None, limit: float = 2.0) -> None:
        self._limit = limit
        self._deadline = float("inf")
        self._specials = specials or {}
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.filters[_TICK] = self._tick
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: datetime.datetime.now().strftime(form),
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], limit: float = 2.0) -> ChatTemplate:
        """The template of a model folder: chat_template.jinja, else `chat_template` of tokenizer_config.json."""
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        own = folder / "chat_template.jinja"
        source = own.read_text(encoding="utf-8") if own.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not source:
            raise TemplateError(
                f"{folder} has no chat template; add chat_template.jinja or `chat_template` in tokenizer_config.json"
            )
        specials = {}
        for name, value in config.items():
            if name.endswith("_token"):
                content = value["content"] if isinstance(value, dict) else value
                if isinstance(content, str):
                    specials[name] = content
        return cls(source, specials, limit)

    def render(
        self,
        /,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **names: Any,
    ) -> str:
        """Prompt text. Raises TemplateError with the template's own words. Not reentrant across threads."""
        self._deadline = time.thread_time() + self._limit
        try:
            return self._template.render(
                {
                    **self._specials,
                    **names,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError:
            raise
        # Whatever a template's own code raises on these messages (a missing key, a wrong type, too
        # deep a recursion) is the template's refusal, and the caller's request is what it refused.
        except Exception as error:
            raise TemplateError(f"the chat template failed on these messages: {type(error).__name__}: {error}") from error

    @jinja2.pass_context  # a filter that takes the context is not folded away at compile time
    def _tick(self, _context: Any, _: str) -> str:
        if time.thread_time() > self._deadline:
            raise TemplateError(f"the chat template ran longer than {self._limit:g} s and was stopped")
        return ""


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: tool-call arguments as objects, and no content of None.

    The wire carries arguments as a JSON string; templates of the Hugging Face world write objects. A
    string that is no JSON object stays as it is.
    """
    shaped = []
    for message in messages:
        message = {**message, "content": message.get("content") or ""}
        if message.get("tool_calls"):
            message["tool_calls"] = [_object_arguments(call) for call in message["tool_calls"]]
        elif "tool_calls" in message:
            del message["tool_calls"]
        shaped.append(message)
    return shaped


def _object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


_TICK = "__tick__"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, plus a time check in every loop and macro and a bound on repeated text."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: Any = (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)
        for node in tree.find_all(loops):
            check = jinja2.nodes.Filter(jinja2.nodes.Const(""), _TICK, [], [], None, None)
            tick = jinja2.nodes.ExprStmt(check, lineno=node.lineno)
            node.body.insert(0, tick.set_environment(self))
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Messages are dicts, and `message.role` is most of what a template does: the sandbox's own way
        # (attribute first, then item) gives the same answer through an exception each time.
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("the chat template uses **, which is not allowed")
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (str, list, tuple)) and isinstance(other, int) and len(one) * other > MAX_REPEAT:
                raise TemplateError(f"the chat template repeats text to more than {MAX_REPEAT} characters")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text in some templates; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML and sorts keys; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the chat template refuses these messages: {message}")
