"""Environments: write what the world answers, and let `EnvAgent` talk to the policy.

An `Env` is one episode. It never sees the model, the endpoint or a token; `EnvAgent` runs it over the
chat endpoint turn by turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_agentrl.agent.types import ChatEndpoint, Result, Task


class EnvironmentFailure(RuntimeError):
    """The environment broke (a sandbox died, a service is away): the run is asked again, not scored."""


@dataclass(frozen=True)
class Step:
    """What the environment answers to one assistant message.

    messages  added to the conversation: tool results (one per tool call) and user messages
    done      whether the episode is over
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False


class Env(Protocol):
    """One episode. Made anew for each run; raise EnvironmentFailure for faults that are not the policy's."""

    #: OpenAI tool definitions the policy is offered (empty: none).
    tools: list[dict[str, Any]]

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        """The conversation the episode starts with."""
        ...

    async def step(self, message: dict[str, Any]) -> Step:
        """Takes the policy's message (role, content, tool_calls)."""
        ...

    async def reward(self) -> float:
        """The reward of the episode so far."""
        ...


class EnvAgent:
    """Runs an Env over the chat endpoint: subclass with `env = YourEnv`.

    The episode ends when the environment says so, when a reply is cut by length, or after
    `chat.max_turns` policy turns. Metrics: `turns`, `cut` (the last reply was cut by length).
    """

    env: type[Env]

    async def run(self, task: Task, chat: ChatEndpoint) -> Result:
        env = self.env()
        client = chat.openai()
        messages = await env.reset(task)
        offered: dict[str, Any] = {"tools": env.tools} if env.tools else {}
        turns, cut = 0, False
        while turns < chat.max_turns and not cut:
            reply = await client.chat.completions.create(model=chat.model, messages=messages, **offered)
            turns += 1
            choice = reply.choices[0]
            message = choice.message.model_dump(exclude_none=True)
            messages = [*messages, message]
            step = await env.step(message)
            messages += step.messages
            cut = choice.finish_reason == "length"
            if step.done:
                break
        return Result(await env.reward(), {"turns": float(turns), "cut": float(cut)})
