"""The policy as an agent's chat endpoint, and the HTTP connections that all runs of a worker share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import aiohttp
import httpx2
from openai import AsyncOpenAI, NotGiven, Omit
from openai._base_client import make_request_options
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion

#: Name under which the gateway's policy is asked for. The gateway serves one policy and does not look at it.
MODEL = "policy"


class AiohttpTransport(httpx2.AsyncBaseTransport):
    """Sends the OpenAI client's requests over an aiohttp session.

    A worker keeps hundreds of requests in flight to one host. The client's own transport searches its
    whole pool at every request; aiohttp takes a connection from a list and parses HTTP in C.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        timeouts = request.extensions.get("timeout", {})
        try:
            async with self._session.request(
                request.method,
                str(request.url),
                headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw],
                data=await request.aread(),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeouts.get("read"), connect=timeouts.get("connect")),
            ) as response:
                content = await response.read()
                return httpx2.Response(
                    response.status,
                    # The body is already decoded and whole.
                    headers=[pair for pair in response.raw_headers if pair[0].lower() not in _HOP_HEADERS],
                    content=content,
                    request=request,
                )
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise httpx2.ReadTimeout(f"{request.url}: no reply within {timeouts.get('read')} s", request=request) from error
        except aiohttp.ClientConnectorError as error:
            raise httpx2.ConnectError(str(error), request=request) from error
        except aiohttp.ClientError as error:
            raise httpx2.ReadError(f"{type(error).__name__}: {error}", request=request) from error


_HOP_HEADERS = frozenset({b"content-encoding", b"content-length", b"transfer-encoding"})


def shared_client(session: aiohttp.ClientSession, timeout: float) -> httpx2.AsyncClient:
    """One HTTP client for all runs of a worker process, over the worker's own connections.

    timeout  seconds one request may take
    """
    return httpx2.AsyncClient(
        transport=AiohttpTransport(session), timeout=httpx2.Timeout(timeout, connect=10.0), trust_env=False
    )


class PolicyCompletions(AsyncCompletions):
    """`chat.completions` without the walk of every message through every message type.

    That walk only renames fields of binary inputs, which the gateway does not take, and costs more than
    the rest of a call. What streams goes the library's way (and is refused by the gateway).
    """

    async def create(self, **arguments: Any) -> Any:  # type: ignore[override]
        if arguments.get("stream"):
            return await super().create(**arguments)
        options = make_request_options(**{name: arguments.pop(name) for name in _TRANSPORT & set(arguments)})
        body = {name: value for name, value in arguments.items() if not isinstance(value, (Omit, NotGiven))}
        return await self._client.post("/chat/completions", body=body, options=options, cast_to=ChatCompletion)


_TRANSPORT = frozenset({"extra_headers", "extra_query", "extra_body", "timeout"})


class PolicyChat(AsyncChat):
    """`client.chat` with PolicyCompletions."""

    @cached_property
    def completions(self) -> PolicyCompletions:
        return PolicyCompletions(self._client)


class PolicyClient(AsyncOpenAI):
    """An AsyncOpenAI that spends little CPU on each chat request."""

    @cached_property
    def chat(self) -> PolicyChat:
        return PolicyChat(self)


@dataclass
class Endpoint:
    """One run's endpoint; see `megatron_agentrl.agent.types.ChatEndpoint`."""

    base_url: str
    api_key: str
    max_turns: int
    http: httpx2.AsyncClient
    model: str = MODEL

    def openai(self) -> AsyncOpenAI:
        """An `AsyncOpenAI` bound to this run. Two retries, which the gateway answers without sampling twice."""
        return PolicyClient(base_url=self.base_url, api_key=self.api_key, http_client=self.http, max_retries=2)
