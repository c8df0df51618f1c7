"""An agent that answers a sum in one turn, in a given format, and is paid for the format and for the number."""

from __future__ import annotations

import re

from megatron_agentrl.agent.rewards import score
from megatron_agentrl.agent.types import ChatEndpoint, Result, Task

#: What the policy is shown before the question: the format, and one example of it.
EXAMPLE = [
    {"role": "system", "content": "Reply with the final number inside <answer></answer> tags."},
    {"role": "user", "content": "State the final answer to the following arithmetic problem: 3 + 14 ="},
    {"role": "assistant", "content": "<answer>17</answer>"},
]

#: Of the reward of 1: what the format alone is worth, and what the right number adds.
FORMAT, RIGHT = 0.3, 0.7

_ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>", re.ASCII)


class ArithmeticAgent:
    """Reward 0.3 for a reply that holds one answer in its tags, and 0.7 more when it is the right number."""

    async def run(self, task: Task, chat: ChatEndpoint) -> Result:
        reply = await chat.openai().chat.completions.create(model=chat.model, messages=[*EXAMPLE, *task.messages])
        found = _ANSWER.findall(reply.choices[0].message.content or "")
        right = len(found) == 1 and score(task, found[0]) == 1.0
        return Result(
            reward=FORMAT * (len(found) == 1) + RIGHT * right,
            metrics={"format": float(len(found) == 1), "correct": float(right)},
        )
