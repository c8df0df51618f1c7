"""Clients of one engine process: `VllmClient` generates (asynchronous), `VllmEngine` takes weights (blocking).

Both speak vLLM's HTTP routes and nothing else. Ids, logprobs and versions are taken from the reply or the reply is an
error: nothing is made up. Policy versions are integers; on vLLM's side they are their decimal text, or `none`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import msgspec

from megatron_agentrl.weights.engine import EngineError, Staging
from megatron_agentrl.weights.manifest import Manifest
from megatron_agentrl.weights.staging import BeginStaging
from megatron_agentrl.weights.transport import Rendezvous

__all__ = ["EngineError", "GenerateReply", "VllmClient", "VllmEngine"]

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
            raise EngineError(self.name, "refused", f"status {status}: {_excerpt(payload)}")
        return parse_reply(self.name, payload)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def parse_reply(engine: str, payload: bytes) -> GenerateReply:
    """The reply of `/inference/v1/generate` for one choice. Raises EngineError where anything is missing or odd."""
    choice = _decode(engine, payload).choices[0]
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


def _decode(engine: str, payload: bytes) -> _Reply:
    try:
        reply = _reply_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise EngineError(engine, "protocol", f"unreadable reply ({error}): {_excerpt(payload)}") from error
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


def _excerpt(payload: bytes) -> str:
    return payload[:500].decode(errors="replace")


class VllmEngine:
    """An engine replica as the publisher sees it (implements `weights.engine.Engine`). Threads may share it."""

    def __init__(self, name: str, url: str, token: str, workers: int = 1) -> None:
        self.name = name
        self.workers = workers
        self._manifest: Manifest | None = None
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def wait_ready(self, deadline: float, alive: Any = None) -> None:
        """Returns when the server answers `/health`. `alive()`, if given, says whether the process still runs."""
        while True:
            if alive is not None and not alive():
                raise EngineError(self.name, "unreachable", "the engine process ended while starting; see its log")
            try:
                if self._http.get("/health", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            if time.monotonic() > deadline:
                raise EngineError(self.name, "late", "the server did not come up in time")
            time.sleep(0.1)

    def begin_staging(
        self, version: int, manifest: Manifest, rendezvous: Rendezvous | None, seconds: float, deadline: float
    ) -> None:
        known = rendezvous is None and manifest == self._manifest
        request = BeginStaging(version, seconds, None if known else manifest, rendezvous)
        self._call_workers("stage_begin", deadline, msgspec.json.encode(request).decode())
        self._manifest = manifest

    def staging(self, deadline: float) -> list[Staging]:
        return msgspec.convert(self._call_workers("stage_status", deadline), list[Staging])

    def pause(self, clear_cache: bool, deadline: float) -> None:
        self._post("/pause", deadline, params={"mode": "keep", "clear_cache": str(clear_cache).lower()})

    def install(self, version: int, deadline: float) -> None:
        self._post("/update_weight_version", deadline, json={"new_version": NO_VERSION})
        self._post("/start_weight_update", deadline)
        self._post("/update_weights", deadline, json={"update_info": {"version": version}})
        self._post("/finish_weight_update", deadline, json={"weight_version": str(version)})

    def resume(self, deadline: float) -> None:
        self._post("/resume", deadline)

    def withdraw(self, deadline: float) -> None:
        self._post("/update_weight_version", deadline, json={"new_version": NO_VERSION})
        self._post("/abort_requests", deadline, json={})

    def name_version(self, version: int, deadline: float) -> None:
        """Gives the present weights their version. For an engine that loaded a model folder itself: it starts without."""
        self._post("/update_weight_version", deadline, json={"new_version": str(version)})

    def version(self, deadline: float) -> int | None:
        """The version the engine stamps on tokens now."""
        name = self._request("GET", "/weight_info", deadline).json()["weight_version"]
        return int(name) if name.isdecimal() else None

    def score(self, token_ids: Sequence[int], deadline: float) -> list[float]:
        # Prompt logprobs are taken before any sampling processor and never read from the prefix cache.
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "logprobs": 0, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        entries = _decode(self.name, self._post("/inference/v1/generate", deadline, json=body).content).prompt_logprobs
        if entries is None or len(entries) != len(token_ids):
            found = None if entries is None else len(entries)
            raise EngineError(self.name, "protocol", f"{found} prompt logprobs for {len(token_ids)} tokens")
        try:
            return [float(entry[token]["logprob"]) for entry, token in zip(entries[1:], token_ids[1:], strict=True)]  # type: ignore[index]
        except (KeyError, TypeError) as error:
            raise EngineError(self.name, "protocol", f"prompt logprobs lack the prompt's own token: {error}") from error

    # ---- HTTP ----------------------------------------------------------------------------------------------------

    def _call_workers(self, method: str, deadline: float, *args: str) -> list[Any]:
        return self._post("/collective_rpc", deadline, json={"method": method, "args": list(args)}).json()["results"]

    def _post(self, path: str, deadline: float, **kwargs: Any) -> httpx.Response:
        return self._request("POST", path, deadline, **kwargs)

    def _request(self, method: str, path: str, deadline: float, **kwargs: Any) -> httpx.Response:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise EngineError(self.name, "late", f"no time left for {path}")
        try:
            response = self._http.request(method, path, timeout=seconds, **kwargs)
        except httpx.TimeoutException as error:
            raise EngineError(self.name, "late", f"{path} took more than {seconds:.1f} s") from error
        except httpx.TransportError as error:
            raise EngineError(self.name, "unreachable", f"{path}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise EngineError(
                self.name, "refused", f"{path}: status {response.status_code}: {_excerpt(response.content)}"
            )
        return response
