"""The gateway's HTTP face: the OpenAI chat wire for agents, control routes for the run.

Decodes, authorises, asks an engine, encodes. What a request means for tokens is `gateway.session`;
who may do what is `gateway.registry`. Replies are whole (no streaming) and one per request.

A request whose reply was not delivered may be repeated: with an `Idempotency-Key`, or with the OpenAI
client's retry count above 0 and the same body, it gets the stored reply or joins the one in progress.
The same body sent anew is a new sample. A request whose client is gone is cancelled and leaves no tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megatron_agentrl.chat.sampling import SamplingContract, SamplingRefused
from megatron_agentrl.chat.template import TemplateError
from megatron_agentrl.gateway.busy import BusyClock, Interval
from megatron_agentrl.gateway.registry import Interaction, OpenSession, Registry, SessionError
from megatron_agentrl.gateway.session import (
    Completion,
    EngineReply,
    EngineReplyError,
    PendingTurn,
    Policy,
    RequestRefused,
)
from megatron_agentrl.trajectory.spool import SpoolError
from megatron_agentrl.trajectory.types import Trajectory, Where

log = logging.getLogger(__name__)

#: Largest request body, in bytes.
MAX_BODY = 64 << 20


class Engines(Protocol):
    """Where sampled tokens come from."""

    async def generate(
        self, token_ids: list[int], *, max_tokens: int, temperature: float, stop_token_ids: list[int]
    ) -> EngineReply: ...


#: Records a span of the event log: name, start and stop in seconds since the epoch.
Record = Callable[[str, float, float], None]

#: Seconds between writings of busy intervals to the event log.
RECORD_EVERY = 1.0

#: Takes `PUT /engines/NAME`: (name, body). Raises ValueError for a body it cannot use.
EngineUpdate = Callable[[str, dict[str, Any]], Awaitable[None]]


class SessionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /sessions`. What is left out follows the recipe."""

    task_id: str
    sample: int
    kind: str = "train"
    max_response_tokens: int | None = None
    context_length: int | None = None
    sampling: dict[str, float] = {}


class FinishRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST {session}/finish`."""

    status: str
    reward: float | None = None
    metrics: dict[str, float] = {}
    message: str = ""


class Gateway:
    """One gateway process. `asgi` is the application to serve.

    policy        tokenizer, template and parser of the model
    contract      sampling of a training session; eval sessions may name another temperature
    engines       what samples
    write         stores a trajectory (SpoolWriter.append)
    run_token     what control routes ask for; agents never see it
    public_url    where agents reach this gateway, e.g. http://127.0.0.1:8000
    turn_timeout  seconds one turn may take, waiting for an engine included
    idle_timeout  seconds after which a session nobody uses is dropped
    record        takes spans `engine_busy` for the event log
    take_busy     busy intervals since its last call; by default those in which a request was at `engines`
    update_engine takes `PUT /engines/NAME`
    engine_stats  added to `GET /stats`
    """

    def __init__(
        self,
        policy: Policy,
        contract: SamplingContract,
        engines: Engines,
        write: Callable[[Trajectory], Where | None],
        run_token: str,
        public_url: str,
        turn_timeout: float = 120.0,
        idle_timeout: float = 600.0,
        record: Record | None = None,
        take_busy: Callable[[], list[Interval]] | None = None,
        update_engine: EngineUpdate | None = None,
        engine_stats: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._policy = policy
        self._contract = contract
        self._engines = engines
        self._run_token = run_token
        self._url = public_url.rstrip("/")
        self._turn_timeout = turn_timeout
        self._idle_timeout = idle_timeout
        self._update_engine = update_engine
        self._engine_stats = engine_stats
        self._stop_ids = list(policy.tokenizer.stop_ids)
        self.registry = Registry(policy, write)
        self.busy = BusyClock()
        self._record = record
        self._take_busy = take_busy or self.busy.take
        self.tokens_sampled = 0
        self.requests = 0
        self.refused: Counter[str] = Counter()
        self.asgi = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/stats", self._stats),
                Route("/sessions", self._open, methods=["POST"]),
                Route("/sessions/{rollout_id}/finish", self._finish, methods=["POST"]),
                Route("/sessions/{rollout_id}/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/engines/{name}", self._put_engine, methods=["PUT"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._sweep()), asyncio.create_task(self._record_busy())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._write_busy()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._idle_timeout / 10)
            self.registry.expire(self._idle_timeout)

    async def _record_busy(self) -> None:
        while True:
            await asyncio.sleep(RECORD_EVERY)
            self._write_busy()

    def _write_busy(self) -> None:
        intervals = self._take_busy()
        if self._record is not None:
            for start, stop in intervals:
                self._record("engine_busy", start, stop)

    # Control routes

    async def _health(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def _stats(self, request: Request) -> Response:
        if refusal := self._not_the_run(request):
            return refusal
        registry = self.registry
        stats = {
            "in_flight": self.busy.in_flight,
            "sessions": len(registry),
            "requests": self.requests,
            "tokens_sampled": self.tokens_sampled,
            "splits": dict(registry.splits),
            "finished": dict(registry.finished),
            "expired": registry.expired,
            "errors": dict(self.refused),
            "busy": {"seconds": self.busy.seconds, "fraction": self.busy.fraction},
        }
        if self._engine_stats is not None:
            stats["engines"] = self._engine_stats()
        return _json(stats)

    async def _open(self, request: Request) -> Response:
        if refusal := self._not_the_run(request):
            return refusal
        try:
            asked = _decode_session.decode(await request.body())
            contract = self._session_contract(asked)
        except (msgspec.DecodeError, SamplingRefused, RequestRefused) as error:
            return _error(400, "invalid_request_error", str(error))
        made = self.registry.open(asked.task_id, asked.sample, asked.kind, contract)
        url = f"{self._url}/sessions/{made.rollout_id}"
        return _json(
            {
                "rollout_id": made.rollout_id,
                "session_url": url,
                "openai_base_url": f"{url}/v1",
                "api_key": made.api_key,
                "control_key": made.control_key,
            }
        )

    def _session_contract(self, asked: SessionRequest) -> SamplingContract:
        base = self._contract
        if asked.kind not in ("train", "eval"):
            raise RequestRefused(f"kind {asked.kind!r}: expected train or eval")
        if unknown := sorted(set(asked.sampling) - {"temperature", "max_tokens"}):
            raise RequestRefused(f"sampling.{unknown[0]} is not part of the sampling contract (temperature, max_tokens)")
        training = asked.kind == "train"
        temperature = asked.sampling.get("temperature", base.temperature)
        if training and temperature != base.temperature:
            raise RequestRefused(f"temperature {temperature:g} for training; the recipe trains at {base.temperature:g}")
        return SamplingContract(
            temperature=temperature,
            max_tokens=int(asked.sampling.get("max_tokens", base.max_tokens)),
            max_response_tokens=base.max_response_tokens if asked.max_response_tokens is None else asked.max_response_tokens,
            context_length=min(base.context_length, asked.context_length or base.context_length),
            training=training,
        )

    async def _finish(self, request: Request) -> Response:
        try:
            asked = _decode_finish.decode(await request.body())
            receipt = self.registry.finish(
                request.path_params["rollout_id"], _bearer(request), asked.status, asked.reward, asked.metrics, asked.message
            )
        except msgspec.DecodeError as error:
            return _error(400, "invalid_request_error", str(error))
        except SessionError as error:
            return _error(error.status, "session_error", str(error))
        except (SpoolError, OSError) as error:
            log.error("a trajectory could not be stored", exc_info=error)
            return _error(500, "storage_error", f"the trajectory could not be stored: {error}")
        return _json(receipt)

    async def _put_engine(self, request: Request) -> Response:
        if refusal := self._not_the_run(request):
            return refusal
        if self._update_engine is None:
            return _error(404, "invalid_request_error", "this gateway has a fixed engine")
        try:
            await self._update_engine(request.path_params["name"], _decode_object.decode(await request.body()))
        except (msgspec.DecodeError, ValueError) as error:
            return _error(400, "invalid_request_error", str(error))
        return _json({"status": "ok"})

    def _not_the_run(self, request: Request) -> Response | None:
        if hmac.compare_digest(_bearer(request).encode(), self._run_token.encode()):
            return None
        return _error(401, "authentication_error", "the run's token is missing or wrong")

    # The agent's route

    async def _chat(self, request: Request) -> Response:
        try:
            found = self.registry.for_agent(request.path_params["rollout_id"], _bearer(request))
            body = await request.body()
            if len(body) > MAX_BODY:
                raise SessionError(413, f"{len(body)} bytes; at most {MAX_BODY} expected")
            interaction = self._interaction(found, request, body)
        except SessionError as error:
            return _error(error.status, "session_error", str(error))
        return await self._await_reply(request, found, interaction)

    def _interaction(self, found: OpenSession, request: Request, body: bytes) -> Interaction:
        """The interaction this request stands for: one in progress or answered, else a new one."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        header = request.headers.get("idempotency-key")
        key = f"key {header}" if header else f"body {digest.hex()}"
        known = found.interactions.get(key)
        if known is not None and header and known.body_digest != digest:
            raise SessionError(409, "this Idempotency-Key came with another body before")
        repeated = header or request.headers.get("x-stainless-retry-count", "0") != "0"
        if known is None or not repeated or _failed(known.task):
            task = asyncio.create_task(self._answer(found, body))
            found.running.add(task)
            task.add_done_callback(found.running.discard)
            known = found.interactions[key] = Interaction(digest, task)
        return known

    async def _await_reply(self, request: Request, found: OpenSession, interaction: Interaction) -> Response:
        """The interaction's reply; when the last client waiting for it is gone, it is cancelled."""
        interaction.waiters += 1
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({interaction.task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            interaction.waiters -= 1
            if not interaction.task.done() and interaction.waiters == 0:
                interaction.task.cancel()
        if not interaction.task.done():
            return Response(status_code=499)  # nobody is left to read it
        if interaction.task.cancelled():
            return _error(410, "session_error", "the session was finished while this request ran")
        error = interaction.task.exception()
        if error is None:
            return Response(interaction.task.result(), media_type="application/json")
        return self._refusal(error)

    async def _answer(self, found: OpenSession, body: bytes) -> bytes:
        """Plans, asks an engine, records; the encoded reply. Exceptions are turned into statuses by `_refusal`."""
        self.requests += 1
        request = _decode_object.decode(body)
        session = found.session
        pending = session.plan(request)
        if pending.max_tokens == 0:
            return _completion(session.commit(pending, None), str(request.get("model", "policy")))
        try:
            completion = session.commit(pending, await self._generate(found, pending))
        except (EngineFailed, EngineReplyError) as error:
            found.engine_failure = str(error)
            raise
        found.engine_failure = None
        self.tokens_sampled += completion.sampled_tokens
        return _completion(completion, str(request.get("model", "policy")))

    async def _generate(self, found: OpenSession, pending: PendingTurn) -> EngineReply:
        """Asks an engine. Whatever goes wrong there leaves the session without this turn."""
        try:
            with self.busy:
                async with asyncio.timeout(self._turn_timeout):
                    return await self._engines.generate(
                        pending.prompt_ids,
                        max_tokens=pending.max_tokens,
                        temperature=pending.temperature,
                        stop_token_ids=self._stop_ids,
                    )
        except asyncio.CancelledError:
            found.session.abandon(pending)
            raise
        # The boundary to the engines: any failure of theirs is one failed turn, told to the agent as 502 and
        # remembered so that the trajectory cannot be scored.
        except Exception as error:
            found.session.abandon(pending)
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError):
                reason = f"no reply from an engine within {self._turn_timeout:g} s"
            raise EngineFailed(reason) from error

    def _refusal(self, error: BaseException) -> Response:
        if isinstance(error, SamplingRefused):
            response = _error(400, "invalid_request_error", str(error), error.parameter)
        elif isinstance(error, (msgspec.DecodeError, RequestRefused, TemplateError)):
            response = _error(400, "invalid_request_error", str(error))
        elif isinstance(error, RecursionError):
            response = _error(400, "invalid_request_error", "the request is nested too deeply")
        elif isinstance(error, (EngineFailed, EngineReplyError)):
            response = _error(502, "engine_error", str(error))
        else:
            log.error("a chat request failed inside the gateway", exc_info=error)
            response = _error(500, "internal_error", f"{type(error).__name__}: {error}")
        self.refused[str(response.status_code)] += 1
        return response


class EngineFailed(RuntimeError):
    """No engine gave a reply for this turn."""


_decode_object = msgspec.json.Decoder(dict[str, Any])
_decode_session = msgspec.json.Decoder(SessionRequest)
_decode_finish = msgspec.json.Decoder(FinishRequest)
_encode = msgspec.json.Encoder().encode


def _completion(completion: Completion, model: str) -> bytes:
    prompt, sampled = completion.prompt_tokens, completion.sampled_tokens
    return _encode(
        {
            "id": f"chatcmpl-{time.monotonic_ns():x}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": completion.reply.wire(),
                    "finish_reason": completion.wire_finish_reason,
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        }
    )


def _failed(task: asyncio.Task[bytes]) -> bool:
    """Whether the interaction ended, or is about to end, without a reply."""
    if not task.done():
        return task.cancelling() > 0
    return task.cancelled() or task.exception() is not None


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _json(value: Any, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")


def _error(status: int, kind: str, message: str, parameter: str | None = None) -> Response:
    return _json({"error": {"message": message, "type": kind, "param": parameter, "code": kind}}, status)
