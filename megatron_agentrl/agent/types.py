"""The types a user's agent meets: Task in, Result out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One prompt. `messages` are OpenAI chat messages; `answer` and `metadata` come from the data file as they stand."""

    task_id: str
    messages: list[dict[str, Any]]
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """Outcome of one agent run: the reward, and numbers to average over runs (e.g. {"through_tool": 1.0})."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


class ChatEndpoint(Protocol):
    """The policy as an agent sees it: an OpenAI-compatible endpoint that belongs to this one run."""

    base_url: str
    api_key: str
    model: str
    max_turns: int

    def openai(self) -> Any:
        """An `openai.AsyncOpenAI` bound to this endpoint (connections are pooled across runs)."""
        ...


class Agent(Protocol):
    """Runs one task against the endpoint. Built once per worker; `run` is called concurrently."""

    async def run(self, task: Task, chat: ChatEndpoint) -> Result: ...
