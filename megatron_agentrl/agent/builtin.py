"""Agents that come with the package."""

from __future__ import annotations

from megatron_agentrl.agent.rewards import score
from megatron_agentrl.agent.types import ChatEndpoint, Result, Task


class SingleTurnAgent:
    """Asks the task's messages once; the reward is `rewards.score` of the reply's content."""

    async def run(self, task: Task, chat: ChatEndpoint) -> Result:
        reply = await chat.openai().chat.completions.create(model=chat.model, messages=task.messages)
        choice = reply.choices[0]
        return Result(
            reward=score(task, choice.message.content),
            metrics={"finished": float(choice.finish_reason == "stop")},
        )
