"""Generation by one engine process: `VllmClient`, asynchronous, over vLLM's HTTP routes. No torch.

Ids, logprobs and versions are taken from the reply or the reply is an
error: nothing is made up. Policy versions are integers; on vLLM's side they are their decimal text, or `none`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from megatron_agentrl.weights.engine import EngineError

__all__ = ["EngineError", "GenerateReply", "VllmClient"]

#: Version name of weights that no request may be served with.
NO_VERSION = "none"


@dataclass(slots=True)
class GenerateReply:
    """One sampled turn. `ids`, `logprobs` and `versions` have one entry per sampled token.

    `logprobs` are of the distribution that was sampled from; `finish_reason` is stop or length.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    engine: str


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[int, Any] | None] | None = None


_encoder = msgspec.json.Encoder()
_reply_decoder = msgspec.json.Decoder(_Reply)


class VllmClient:
    """Generates on one engine. Made inside a running event loop; close it there. Connections are kept and reused."""

    def __init__(self, name: str, url: str, token: str, timeout: float = 120.0) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int] = ()
    ) -> GenerateReply:
        """Samples up to `max_tokens` after `token_ids`; a sampled stop token is part of the reply.

        Sampling stops at `stop_token_ids` alone: an end-of-sequence id of the model folder must be among them.

        Raises EngineError: unreachable, late, refused (the engine's own message), aborted, protocol, unversioned.
        """
        # No per-request seed: it adds nothing to the engine's own and costs it a generator per request.
        body = _encoder.encode(
            {
                "token_ids": list(token_ids),
                "sampling_params": {
                    "max_tokens": max_tokens,
                    "temperature": temperature,
                    "stop_token_ids": list(stop_token_ids),
                    "ignore_eos": True,
                    "logprobs": 0,
                    "detokenize": False,
                },
            }
        )
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30), headers=self._headers
            )
        try:
            async with self._session.post(
                f"{self.url}/inference/v1/generate", data=body, timeout=self._timeout
            ) as response:
                payload = await response.read()
                status = response.status
        except TimeoutError as error:
            raise EngineError(self.name, "late", f"no reply within {self._timeout.total:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineError(self.name, "unreachable", f"{type(error).__name__}: {error}") from error
        if status != 200:
            raise EngineError(self.name, "refused", f"status {status}: {excerpt(payload)}")
        return parse_reply(self.name, payload)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def parse_reply(engine: str, payload: bytes) -> GenerateReply:
    """The reply of `/inference/v1/generate` for one choice. Raises EngineError where anything is missing or odd."""
    choice = decode(engine, payload).choices[0]
    if choice.finish_reason not in ("stop", "length"):
        raise EngineError(engine, "aborted", f"the request ended with finish_reason {choice.finish_reason!r}")
    content = choice.logprobs.content if choice.logprobs is not None else None
    ids = choice.token_ids
    if not ids or content is None:
        raise EngineError(engine, "protocol", "the reply lacks token ids or logprobs")
    if [entry.token_id for entry in content] != ids:
        raise EngineError(engine, "protocol", f"{len(content)} logprobs do not belong to the {len(ids)} token ids")
    logprobs = [entry.logprob for entry in content]
    return GenerateReply(ids, logprobs, _versions(engine, choice, len(ids)), choice.finish_reason, engine)


def decode(engine: str, payload: bytes) -> _Reply:
    try:
        reply = _reply_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise EngineError(engine, "protocol", f"unreadable reply ({error}): {excerpt(payload)}") from error
    if len(reply.choices) != 1:
        raise EngineError(engine, "protocol", f"{len(reply.choices)} choices in a reply to one sample")
    return reply


def _versions(engine: str, choice: _Choice, tokens: int) -> list[int]:
    """One version per token from the engine's spans, which must tile [0, tokens)."""
    versions: list[int] = []
    for span in choice.weight_versions or []:
        if span.start != len(versions) or span.end <= span.start:
            raise EngineError(engine, "protocol", f"version spans {choice.weight_versions} leave gaps or overlap")
        if not span.version.isdecimal():
            raise EngineError(engine, "unversioned", f"tokens were sampled by weights of version {span.version!r}")
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != tokens:
        raise EngineError(engine, "protocol", f"version spans cover {len(versions)} of {tokens} tokens")
    return versions


def excerpt(payload: bytes) -> str:
    return payload[:500].decode(errors="replace")
