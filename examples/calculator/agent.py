"""An agent that may use a calculator: asks, runs the tool calls, asks again, and is paid for the right answer."""

from __future__ import annotations

import json
import re

from megatron_agentrl.agent.types import ChatEndpoint, Result, Task

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes one operation on two whole numbers, e.g. 63+43.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

#: Longest reply, in tokens.
TURN_TOKENS = 14

_OPERATION = re.compile(r"(-?\d{1,6})([+\-*])(\d{1,4})", re.ASCII)


def calculator(expression: str) -> str:
    """The value of one operation, or `err` for anything else."""
    found = _OPERATION.fullmatch(expression)
    if found is None:
        return "err"
    left, operator, right = int(found[1]), found[2], int(found[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])


class CalculatorAgent:
    """Reward 1 when the final answer is exactly right. Questions chain operations from left to right."""

    async def run(self, task: Task, chat: ChatEndpoint) -> Result:
        client = chat.openai()
        messages = list(task.messages)
        results: list[str] = []
        answer = None
        for _ in range(chat.max_turns):
            reply = await client.chat.completions.create(
                model=chat.model, messages=messages, tools=TOOLS, max_tokens=TURN_TOKENS
            )
            choice = reply.choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            if not choice.message.tool_calls:
                if choice.finish_reason == "stop":
                    answer = choice.message.content
                break
            for call in choice.message.tool_calls:
                result = calculator(json.loads(call.function.arguments)["expression"])
                results.append(result)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        right = answer == task.answer
        return Result(
            reward=float(right),
            metrics={"through_tool": float(right and answer in results), "tool_rate": float(bool(results))},
        )
