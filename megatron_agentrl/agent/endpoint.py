"""The policy as an agent's chat endpoint, and the HTTP client that all runs of a worker share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2
from openai import AsyncOpenAI

#: Name under which the gateway's policy is asked for. The gateway serves one policy and does not look at it.
MODEL = "policy"


def shared_client(concurrency: int, timeout: float) -> httpx2.AsyncClient:
    """One pooled HTTP client for a worker process: room for `concurrency` requests at once.

    timeout  seconds one request may take
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=max(concurrency, 16), keepalive_expiry=60)
    return httpx2.AsyncClient(limits=limits, timeout=httpx2.Timeout(timeout, connect=10.0), trust_env=False)


@dataclass(frozen=True)
class Endpoint:
    """One run's endpoint; see `megatron_agentrl.agent.types.ChatEndpoint`."""

    base_url: str
    api_key: str
    max_turns: int
    http: Any
    model: str = MODEL

    def openai(self) -> AsyncOpenAI:
        """A client bound to this run. Two retries, which the gateway answers without sampling twice."""
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=self.http, max_retries=2)
