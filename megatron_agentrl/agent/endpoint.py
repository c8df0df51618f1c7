"""The policy as an agent's chat endpoint, and the HTTP connections that all runs of a worker share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import aiohttp
import httpx2
import msgspec
from openai import AsyncOpenAI, NotGiven, Omit
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

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
    """`chat.completions` that spends little CPU on a request that goes well.

    The library's own path costs several milliseconds a call: it walks every message through every
    message type, builds three URLs and constructs the reply field by field. Here the body is encoded, sent
    and validated directly. Whatever is out of the ordinary (an error status, a lost connection, options,
    streaming) is the library's: its retries, its exceptions. A second sending says that it is one, so the
    gateway does not sample twice.
    """

    _client: PolicyClient

    async def create(self, **arguments: Any) -> Any:  # type: ignore[override]
        body = {name: value for name, value in arguments.items() if not isinstance(value, (Omit, NotGiven))}
        if body.get("stream") or _OPTIONS & set(body):
            return await super().create(**body)
        payload = await self._client.post_once("/chat/completions", body)
        if payload is not None:
            return ChatCompletion.model_validate_json(payload)
        return await super().create(**body, extra_headers={"x-stainless-retry-count": "1"})


_OPTIONS = frozenset({"extra_headers", "extra_query", "extra_body", "timeout"})


class PolicyChat(AsyncChat):
    """`client.chat` with PolicyCompletions."""

    @cached_property
    def completions(self) -> PolicyCompletions:
        return PolicyCompletions(self._client)


class PolicyClient(AsyncOpenAI):
    """An AsyncOpenAI over a worker's connections, with PolicyCompletions."""

    def __init__(self, session: aiohttp.ClientSession, **options: Any) -> None:
        super().__init__(**options)
        self._session = session

    @cached_property
    def chat(self) -> PolicyChat:
        return PolicyChat(self)

    def copy(self, **options: Any) -> PolicyClient:
        """As in the library; the copy sends over the same connections."""
        return super().copy(**options, _extra_kwargs={"session": self._session})

    with_options = copy

    async def close(self) -> None:
        """Closes nothing: the connections are the worker's, and other runs use them."""

    async def post_once(self, path: str, body: dict[str, Any]) -> bytes | None:
        """The body of a 200 reply; None for anything else, without a word: the caller sends again and learns why."""
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        seconds = self.timeout.read if isinstance(self.timeout, httpx2.Timeout) else self.timeout
        url = str(self.base_url).rstrip("/") + path
        data = _encode(body)
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.post(url, data=data, headers=headers, timeout=timeout) as response:
                payload = await response.read()
                return payload if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None


def _plain(value: Any) -> Any:
    """JSON form of what a client may put in a request beside JSON: the library's own messages."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


@dataclass
class Endpoint:
    """One run's endpoint; see `megatron_agentrl.agent.types.ChatEndpoint`."""

    base_url: str
    api_key: str
    max_turns: int
    session: aiohttp.ClientSession
    http: httpx2.AsyncClient
    model: str = MODEL

    def openai(self) -> AsyncOpenAI:
        """An `AsyncOpenAI` bound to this run. Two retries, which the gateway answers without sampling twice."""
        return PolicyClient(
            self.session,
            base_url=self.base_url,
            api_key=self.api_key,
            http_client=self.http,
            timeout=self.http.timeout,
            max_retries=2,
        )
