"""Writes data/: training questions, held-out questions, and noisy demonstrations. Seeded: the same files every time.

A question chains one or two operations, evaluated from left to right. A demonstration shows how the
calculator is used, and is wrong more often than right: it skips the tool, mistypes a call, stops after
half of the chain or miscopies a result. About 27 % of them end in the right answer, so whatever the
policy gains beyond that it has learned from rewards. No held-out question stands in the other files.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

try:
    from examples.calculator.agent import calculator
except ModuleNotFoundError:  # run as a script from this folder
    from agent import calculator  # type: ignore[no-redef]

SEED = 20
TRAIN, HELD_OUT, DEMONSTRATIONS = 8192, 256, 25_600

#: Shares of demonstrations that skip the tool, and of steps that get a call wrong, stop early or miscopy.
SKIP_TOOL, WRONG_ARGUMENT, STOP_EARLY, WRONG_COPY = 0.35, 0.3, 0.25, 0.25


def question(rng: random.Random) -> tuple[str, list[tuple[str, int]], int]:
    """(text like 63+43*9, its operations after the first number, its value)."""
    value = rng.randint(10, 99)
    text, operations = str(value), []
    for position in range(rng.choice((1, 2))):
        operator = rng.choice("+-*")
        operand = rng.randint(2, 9) if operator == "*" and position else rng.randint(10, 99)
        value = int(calculator(f"{value}{operator}{operand}"))
        text += f"{operator}{operand}"
        operations.append((operator, operand))
    return text, operations, value


def changed_digit(rng: random.Random, text: str) -> str:
    """The text with one digit replaced by another."""
    place = rng.choice([index for index, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([digit for digit in "0123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


def wrong_call(rng: random.Random, expression: str, operator: str) -> str:
    """The expression with a digit changed or (three times in ten) another operator."""
    if rng.random() < 0.7 or expression.startswith("-"):
        return changed_digit(rng, expression)
    return expression.replace(operator, rng.choice([other for other in "+-*" if other != operator]), 1)


def demonstration(rng: random.Random, text: str, operations: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """A chat that answers the question, with noise."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{text}=?"}]
    if rng.random() < SKIP_TOOL:
        highest = 9999 if any(operator == "*" for operator, _ in operations) else 299
        return [*messages, {"role": "assistant", "content": str(rng.randint(10, highest))}]
    current = text[:2]
    for position, (operator, operand) in enumerate(operations):
        expression = f"{current}{operator}{operand}"
        if rng.random() < WRONG_ARGUMENT:
            expression = wrong_call(rng, expression, operator)
        current = calculator(expression)
        messages += tool_turn(f"call_{position}", expression, current)
        if current == "err" or (position + 1 < len(operations) and rng.random() < STOP_EARLY):
            break
    if rng.random() < WRONG_COPY and current != "err":
        current = changed_digit(rng, current)
    return [*messages, {"role": "assistant", "content": current}]


def tool_turn(call_id: str, expression: str, result: str) -> list[dict[str, Any]]:
    """An assistant message that calls the calculator, and the calculator's answer."""
    arguments = json.dumps({"expression": expression})
    call = {"id": call_id, "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


def questions(rng: random.Random, excluded: set[str]) -> Iterator[tuple[str, list[tuple[str, int]], int]]:
    """Questions without end, none of them excluded."""
    while True:
        drawn = question(rng)
        if drawn[0] not in excluded:
            yield drawn


def distinct(drawn: Iterable[tuple[str, list[tuple[str, int]], int]], count: int) -> list[dict[str, str]]:
    """The first `count` different questions as lines of a prompt file."""
    lines: dict[str, dict[str, str]] = {}
    for text, _, value in drawn:
        lines.setdefault(text, {"prompt": f"{text}=?", "answer": str(value)})
        if len(lines) == count:
            return list(lines.values())
    raise ValueError(f"only {len(lines)} different questions; {count} expected")


def files() -> dict[str, bytes]:
    """Name → content of every data file."""
    held_out = distinct(questions(random.Random(f"{SEED} held out"), set()), HELD_OUT)
    excluded = {line["prompt"].removesuffix("=?") for line in held_out}
    train = distinct(questions(random.Random(f"{SEED} train"), excluded), TRAIN)
    rng = random.Random(f"{SEED} demonstrations")
    drawn = questions(rng, excluded)
    shown = [{"messages": demonstration(rng, *next(drawn)[:2])} for _ in range(DEMONSTRATIONS)]
    return {
        "train.jsonl.gz": packed(lines(train)),
        "held_out.jsonl": lines(held_out),
        "demonstrations.jsonl.gz": packed(lines(shown)),
    }


def lines(records: Iterable[dict[str, Any]]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode()


def packed(content: bytes) -> bytes:
    """gzip without a time stamp, so that equal contents are equal files."""
    return gzip.compress(content, compresslevel=9, mtime=0)


def main() -> None:
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    for name, content in files().items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
