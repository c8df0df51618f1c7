"""The `response_template` language: text with marked regions → a dict of parsed values.

A field of the template opens at a mark and runs to its closing mark (or to the end of the text). The
one field without an opening mark, if there is one, takes what lies outside all others; without such a
field that text is dropped. Semantics follow transformers 5.19 (`transformers.utils.chat_parsing`) for
a text that is complete; streaming is not offered. Patterns use Python's `re`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class ResponseTemplateError(ValueError):
    """A response template that this reader does not understand."""


@dataclass(frozen=True, eq=False)
class _Field:
    name: str
    open: re.Pattern[str] | None
    close: re.Pattern[str] | None
    content: str = "text"
    content_args: dict[str, Any] = field(default_factory=dict)
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False


class ResponseTemplate:
    """A compiled response template. Raises ResponseTemplateError for one it cannot follow."""

    def __init__(self, spec: dict[str, Any]) -> None:
        _only(spec, {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}, "response_template")
        if spec.get("version", 1) != 1:
            raise ResponseTemplateError(f"response_template version {spec['version']} found, 1 expected")
        if not spec.get("fields"):
            raise ResponseTemplateError("response_template has no fields")
        for name in ("fields", "defaults"):
            if not isinstance(spec.get(name, {}), dict):
                raise ResponseTemplateError(f"response_template {name}: {type(spec[name]).__name__} found, an object expected")
        self._defaults = dict(spec.get("defaults", {}))
        self._fields = [_field(name, entry) for name, entry in spec["fields"].items()]
        rest = [entry for entry in self._fields if entry.open is None]
        if len(rest) > 1:
            raise ResponseTemplateError(
                f"fields {', '.join(entry.name for entry in rest)} have no opening mark; at most one may take the rest"
            )
        self._rest = rest[0] if rest else None
        anchor = _mark("response_template", spec, "start_anchor", "start_anchor_pattern")
        if anchor is None:
            raise ResponseTemplateError("response_template needs start_anchor or start_anchor_pattern")
        self._anchor = anchor

    def parse(
        self, prompt: str, sampled: str, tools: list[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Values by field name, and the names of fields whose last region ended without its closing mark.

        What the prompt wrote of the assistant's turn (after the last start anchor) belongs to the turn.
        Raises ValueError, KeyError or TypeError where a region's text is not what its parser expects.
        """
        begin = max((found.end() for found in self._anchor.finditer(prompt)), default=0)
        text = prompt[begin:] + sampled
        values = dict(self._defaults)
        coerce = _Coercion(tools)
        position, cut = 0, set()
        current, start = self._rest, 0
        captures: dict[str, str] = {}
        been: set[tuple[_Field | None, int]] = set()
        while (current, position) not in been:  # marks of no width can lead back to where they began
            been.add((current, position))
            found = self._next(text, position, current)
            stop = found[1].start() if found else len(text)
            explicit = current is not self._rest
            if current is not None and (explicit or stop > start):
                _store(values, current, coerce(_value(current, text[start:stop], captures)))
            if found is None:
                if explicit and current is not None and current.close is not None:
                    cut.add(current.name)
                break
            opened, match = found
            current, captures = (opened, {k: v for k, v in match.groupdict().items() if v is not None}) if opened else (self._rest, {})
            position = start = match.end()
        missing = [entry.name for entry in self._fields if not entry.optional and entry.name not in values]
        if missing:
            raise ValueError(f"the turn lacks {', '.join(missing)}")
        kept = {k: v for k, v in values.items() if k in self._defaults or not (v is None or v == "" or v == [] or v == {})}
        return kept, frozenset(cut)

    def _next(self, text: str, position: int, current: _Field | None) -> tuple[_Field | None, re.Match[str]] | None:
        """The next mark from `position`: (field that opens, match), or (None, match) where `current` closes."""
        if current is not None and current is not self._rest:
            found = current.close.search(text, position) if current.close else None
            return (None, found) if found else None
        marks: list[tuple[tuple[int, int, int, str], _Field | None, re.Match[str]]] = []
        for entry in self._fields:
            pattern = entry.open if entry.open is not None else entry.close
            found = pattern.search(text, position) if pattern is not None else None
            if found is not None:
                opens = entry.open is not None
                # The earliest mark wins, then the longest, then one that opens.
                rank = (found.start(), found.start() - found.end(), 0 if opens else 1, entry.name)
                marks.append((rank, entry if opens else None, found))
        return min(marks, key=lambda mark: mark[0])[1:] if marks else None


def _only(spec: Any, known: set[str], scope: str) -> None:
    if not isinstance(spec, dict):
        raise ResponseTemplateError(f"{scope}: {type(spec).__name__} found, an object expected")
    if unknown := sorted(set(spec) - known):
        raise ResponseTemplateError(f"{scope}: unknown keys {unknown}; known are {sorted(known)}")


def _mark(scope: str, spec: dict[str, Any], literal: str, pattern: str) -> re.Pattern[str] | None:
    if literal in spec and pattern in spec:
        raise ResponseTemplateError(f"{scope}: give {literal} or {pattern}, not both")
    if literal in spec:
        words = [spec[literal]] if isinstance(spec[literal], str) else spec[literal]
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise ResponseTemplateError(f"{scope}: {literal} must be text or a list of texts, none empty")
        return re.compile("|".join(re.escape(word) for word in sorted(set(words), key=len, reverse=True)))
    if pattern not in spec:
        return None
    return _pattern(scope, pattern, spec[pattern])


def _pattern(scope: str, name: str, text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ResponseTemplateError(f"{scope}: {name} {text!r} is no regular expression: {error}") from error


def _field(name: str, spec: dict[str, Any]) -> _Field:
    scope = f"response_template field {name}"
    plain = {"content", "content_args", "repeats", "join", "optional", "transform", "transform_each"}
    _only(spec, plain | {"open", "open_pattern", "close", "close_pattern"}, scope)
    entry = _Field(
        name=name,
        open=_mark(scope, spec, "open", "open_pattern"),
        close=_mark(scope, spec, "close", "close_pattern"),
        **{key: spec[key] for key in plain & set(spec)},
    )
    _check_parser(scope, entry.content, entry.content_args)
    if entry.join is not None and not entry.repeats:
        raise ResponseTemplateError(f"{scope}: join needs repeats: true")
    if entry.transform_each and entry.transform is None:
        raise ResponseTemplateError(f"{scope}: transform_each needs a transform")
    return entry


def _check_parser(scope: str, name: Any, args: Any) -> None:
    """What a parser would trip over at every turn is the template's fault, not the policy's."""
    if not isinstance(name, str) or name not in _PARSERS:
        raise ResponseTemplateError(f"{scope}: content parser {name!r}; known are {', '.join(_PARSERS)}")
    if not isinstance(args, dict):
        raise ResponseTemplateError(f"{scope}: {type(args).__name__} found for the parser's arguments, an object expected")
    if name == "xml-inline" and "key" not in _pattern(scope, "tag_pattern", args.get("tag_pattern")).groupindex:
        raise ResponseTemplateError(f"{scope}: tag_pattern {args['tag_pattern']!r} has no group named key")
    if empty := [key for key in ("line_sep", "kv_sep") if args.get(key) == ""]:
        raise ResponseTemplateError(f"{scope}: {empty[0]} is empty")
    if args.get("value_parser") is not None:
        inner = args["value_parser"]
        _only(inner, {"name", "args"}, f"{scope} value_parser")
        _check_parser(f"{scope} value_parser", inner.get("name", "text"), inner.get("args", {}))


def _store(values: dict[str, Any], entry: _Field, value: Any) -> None:
    if entry.join is not None:
        if not isinstance(value, str):
            raise TypeError(f"{entry.name}: {type(value).__name__} cannot be joined with {entry.join!r}")
        values[entry.name] = value if entry.name not in values else values[entry.name] + entry.join + value
    elif entry.repeats:
        values[entry.name] = [*values.get(entry.name, []), value]
    else:
        values[entry.name] = value


def _value(entry: _Field, body: str, captures: dict[str, str]) -> Any:
    value = _PARSERS[entry.content](body, entry.content_args)
    if entry.transform is None:
        return value
    if not entry.transform_each:
        return _transformed(entry.transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError(f"{entry.name}: a list of objects was expected")
    return [_transformed(entry.transform, {**captures, **item}) for item in value]


_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


def _transformed(shape: Any, scope: dict[str, Any]) -> Any:
    """The shape with each `{name}` or `{name.key}` replaced by the value it names."""
    if isinstance(shape, dict):
        return {key: _transformed(part, scope) for key, part in shape.items()}
    if isinstance(shape, list):
        return [_transformed(part, scope) for part in shape]
    found = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    if found is None:
        return shape
    value: Any = scope
    for key in found[1].split("."):
        if not isinstance(value, dict) or key not in value:
            raise KeyError(f"the parsed text has no {found[1]}")
        value = value[key]
    return value


def _text(body: str, args: dict[str, Any]) -> str:
    return body.strip() if args.get("strip", True) else body


def _json(body: str, args: dict[str, Any]) -> Any:
    """JSON, with the dialects models write: bare keys, and strings between marks of their own."""
    strings: list[str] = []
    text = body
    delimiters = args.get("string_delims", [])
    if delimiters and ("\1" in body or "\2" in body):
        raise ValueError("control characters in text whose strings have marks of their own")
    for opening, closing in delimiters:
        pattern = re.escape(opening) + "(.*?)" + re.escape(closing)
        text = re.sub(pattern, lambda found: _set_aside(found[1], strings), text, flags=re.DOTALL)
    if args.get("unquoted_keys"):
        text = re.sub(r"(?<=[{,])(\w+):", r'"\1":', text)
    if strings:
        text = re.sub("\1(\\d+)\2", lambda m: json.dumps(strings[int(m[1])]), text)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise ValueError(f"not JSON: {error}") from error


def _set_aside(string: str, strings: list[str]) -> str:
    """Keeps the string and gives the mark that stands for it."""
    strings.append(string)
    return f"\1{len(strings) - 1}\2"


def _nested(text: str, args: dict[str, Any]) -> Any:
    parser = args.get("value_parser")
    return text if parser is None else _PARSERS[parser.get("name", "text")](text, parser.get("args", {}))


def _xml_inline(body: str, args: dict[str, Any]) -> dict[str, Any]:
    """Values by key for each match of `tag_pattern` (groups `key` and `value`)."""
    values: dict[str, Any] = {}
    for found in re.finditer(args["tag_pattern"], body, flags=re.DOTALL):
        key, value = found["key"], _nested(found.groupdict().get("value") or "", args)
        if key in values and args.get("merge_duplicates"):
            earlier = values[key] if isinstance(values[key], list) else [values[key]]
            value = [*earlier, value]
        values[key] = value
    return values


def _kv_lines(body: str, args: dict[str, Any]) -> dict[str, Any]:
    """Values by key for each line `key<sep>value`."""
    separator = args.get("kv_sep", ":")
    values = {}
    for line in body.split(args.get("line_sep", "\n")):
        if separator in line:
            key, value = _text(line, args).split(separator, 1)
            values[_text(key, args)] = _nested(_text(value, args), args)
    return values


_PARSERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "text": _text,
    "int": lambda body, args: int(_text(body, args)),
    "float": lambda body, args: float(_text(body, args)),
    "bool": lambda body, args: _text(body, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}


class _Coercion:
    """Casts tool-call arguments that arrived as text to the types of the called tool's JSON schema."""

    def __init__(self, tools: list[dict[str, Any]] | None) -> None:
        self._properties: dict[str, dict[str, Any]] = {}
        for tool in tools or []:
            function = tool.get("function", tool)
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                properties = parameters.get("properties") if isinstance(parameters, dict) else None
                self._properties[function["name"]] = properties if isinstance(properties, dict) else {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self(item) for item in value]
        function = value.get("function") if isinstance(value, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(arguments, dict):
            return value
        name = function.get("name")
        properties = self._properties.get(name, {}) if isinstance(name, str) else {}
        for key, argument in arguments.items():
            types = _types(properties.get(key))
            if isinstance(argument, str):
                arguments[key] = _cast(argument, types)
            elif isinstance(argument, list) and types and "array" not in types:
                arguments[key] = [_cast(item, types) if isinstance(item, str) else item for item in argument]
        return value


def _types(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    types = [kind for kind in listed if isinstance(kind, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else []:
            types += _types(choice)
    return [*types, "null"] if schema.get("nullable") and "null" not in types else types


def _cast(text: str, types: list[str]) -> Any:
    """`text` as the first of `types` that it can be; text otherwise."""
    for kind in types:
        try:
            if kind == "integer":
                return int(text)
            if kind == "number":
                number = float(text)
                if abs(number) < float("inf"):  # false for NaN too; neither is a JSON number
                    return int(number) if number.is_integer() and "." not in text else number
            if kind == "boolean" and text.strip().lower() in ("true", "1", "false", "0"):
                return text.strip().lower() in ("true", "1")
            if kind == "null" and text.strip() in ("null", "None"):
                return None
            if kind in ("object", "array"):
                decoded = json.loads(text)
                if isinstance(decoded, dict if kind == "object" else list):
                    return decoded
        except ValueError:
            continue  # not of this kind; the next declared kind may fit
    return text
