"""The coordinator over HTTP: routes, long polls, one commit for all requests of a moment.

Every reply is sent after the commit that holds what it says. A request that cannot be right is answered with
4xx and `{"error": ...}`; anything unexpected ends the process, because the account could be half-changed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from megatron_agentrl.coordinator.rows import LedgerError
from megatron_agentrl.coordinator.service import Assignment, Coordinator, ProtocolError
from megatron_agentrl.trajectory.types import Receipt

log = logging.getLogger(__name__)

#: Longest answer time of /work, and of any `wait`, in seconds.
WORK_WAIT = 2.0
MOST_WAIT = 60.0
#: Requests that come within this time share a commit.
COMMIT_WINDOW = 0.002

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Any]]


class WorkRequest(msgspec.Struct):
    worker: str
    max: int


class WorkReply(msgspec.Struct):
    groups: list[Assignment]
    stop: bool


class StepReport(msgspec.Struct):
    step: int
    metrics: dict[str, Any] = {}


class VersionReport(msgspec.Struct):
    version: int
    engine: str
    state: Literal["published", "proven", "failed"]
    gap: float | None = None
    seconds: float | None = None


class EvalRequest(msgspec.Struct):
    tag: str
    version: int


class CheckpointRequest(msgspec.Struct):
    step: int
    folder: str | None = None


class CoordinatorApp:
    """The ASGI application (`.asgi`). Folders in requests are relative to `run_dir` unless absolute.

    `on_fatal` is called once with the traceback when the process can no longer vouch for its state.
    """

    def __init__(
        self, service: Coordinator, token: str, run_dir: str | Path, on_fatal: Callable[[str], None] = log.critical
    ) -> None:
        self.service = service
        self.run_dir = Path(run_dir)
        self._on_fatal = on_fatal
        self._broken = ""
        self._authorization = f"Bearer {token}".encode()
        self._changed = asyncio.Event()
        self._flush: asyncio.Task[None] | None = None
        routes = [
            ("/work", "POST", self.work),
            ("/receipts", "POST", self.receipts),
            ("/batch", "GET", self.batch),
            ("/steps", "POST", self.steps),
            ("/versions", "POST", self.versions),
            ("/evals", "POST", self.start_eval),
            ("/evals/{eval_id}", "GET", self.eval_status),
            ("/checkpoints", "POST", self.checkpoints),
            ("/resume", "POST", self.resume),
            ("/progress", "POST", self.progress),
            ("/status", "GET", self.status),
        ]
        self.asgi = Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                *(Route(path, self._guard(handler), methods=[method]) for path, method, handler in routes),
            ],
            lifespan=self._lifespan,
        )

    # ---- routes ------------------------------------------------------------------------------------------------

    async def work(self, request: Request) -> WorkReply:
        asked = await _body(request, WorkRequest)
        deadline = time.monotonic() + WORK_WAIT
        while True:
            changed = self._changed
            groups = self.service.work(asked.worker, asked.max)
            left = deadline - time.monotonic()
            if groups or asked.max < 1 or self.service.stopping or left <= 0:
                await self._commit()
                return WorkReply(groups, self.service.stopping)
            await _within(changed, left)
            if await request.is_disconnected():  # do not hand work to a caller that has gone
                raise ClientDisconnect

    async def receipts(self, request: Request) -> dict[str, int]:
        accepted = self.service.receipts(await _body(request, list[Receipt]))
        await self._commit()
        return {"accepted": accepted}

    async def batch(self, request: Request) -> Any:
        step = _number(request, "step", int, None)
        deadline = time.monotonic() + min(_number(request, "wait", float, 0.0), MOST_WAIT)
        while True:
            changed = self._changed
            reply = self.service.batch(step)
            await self._commit()  # also while waiting: stale groups may have been dropped, which makes room
            left = deadline - time.monotonic()
            if reply.status != "waiting" or left <= 0:
                return reply
            await _within(changed, left)

    async def steps(self, request: Request) -> dict[str, bool]:
        report = await _body(request, StepReport)
        self.service.trained(report.step, report.metrics)
        await self._commit()
        return {"ok": True}

    async def versions(self, request: Request) -> dict[str, bool]:
        report = await _body(request, VersionReport)
        self.service.version(report.engine, report.version, report.state, report.gap, report.seconds)
        await self._commit()
        return {"ok": True}

    async def start_eval(self, request: Request) -> dict[str, str]:
        asked = await _body(request, EvalRequest)
        eval_id = self.service.start_eval(asked.tag, asked.version)
        await self._commit()
        return {"eval_id": eval_id}

    async def eval_status(self, request: Request) -> dict[str, Any]:
        deadline = time.monotonic() + min(_number(request, "wait", float, 0.0), MOST_WAIT)
        while True:
            changed = self._changed
            status = self.service.eval_status(request.path_params["eval_id"])
            await self._commit()
            left = deadline - time.monotonic()
            if status["done"] or left <= 0:
                return status
            await _within(changed, left)

    async def checkpoints(self, request: Request) -> dict[str, bool]:
        asked = await _body(request, CheckpointRequest)
        if asked.folder is None:
            raise ProtocolError("folder is missing; give the checkpoint's folder")
        self.service.checkpoint(asked.step, self.run_dir / asked.folder)
        return {"ok": True}

    async def resume(self, request: Request) -> dict[str, bool]:
        asked = await _body(request, CheckpointRequest)
        self.service.resume(asked.step, None if asked.folder is None else self.run_dir / asked.folder)
        await self._commit()
        return {"ok": True}

    async def progress(self, request: Request) -> dict[str, bool]:
        self.service.report_progress(await _body(request, dict[str, Any]))
        self._notify()
        return {"ok": True}

    async def status(self, request: Request) -> dict[str, Any]:
        return self.service.status()

    async def _health(self, request: Request) -> Response:
        return _reply({"status": "ok"})

    # ---- around the routes -------------------------------------------------------------------------------------

    def _guard(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """The route with token check, and every exception turned into what it means."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._authorization):
                return _reply({"error": "the run's token is missing or wrong"}, 401)
            if self._broken:
                return _reply({"error": f"the coordinator is stopping: {self._broken}"}, 503)
            try:
                return _reply(await handler(request))
            except ProtocolError as error:
                return _reply({"error": str(error)}, error.status)
            except ClientDisconnect:
                return Response(status_code=499)
            except LedgerError as error:
                self._fatal(f"the ledger refused {request.method} {request.url.path}: {error}")
                return _reply({"error": str(error)}, 500)
            except Exception:
                self._fatal(f"{request.method} {request.url.path}\n{traceback.format_exc()}")
                raise

        return guarded

    def _fatal(self, reason: str) -> None:
        if not self._broken:
            self._broken = reason
            self._on_fatal(reason)

    async def _commit(self) -> None:
        """Returns when everything so far is durable. What changed wakes whoever waits."""
        if not self.service.ledger.dirty:
            return
        if self._flush is None:
            self._flush = asyncio.create_task(self._flush_soon())
        await asyncio.shield(self._flush)

    async def _flush_soon(self) -> None:
        await asyncio.sleep(COMMIT_WINDOW)
        self._flush = None
        if self._broken:
            raise LedgerError(f"nothing is written any more: {self._broken}")
        try:
            self.service.ledger.commit()
        except Exception:  # told here too: the request that asked for the commit may be gone
            self._fatal(f"commit failed\n{traceback.format_exc()}")
            raise
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _watch_leases(self) -> None:
        interval = min(1.0, self.service.lease / 4)
        while True:
            await asyncio.sleep(interval)
            if self.service.expire():
                await self._commit()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fatal("".join(traceback.format_exception(error)))

        watch = asyncio.create_task(self._watch_leases())
        watch.add_done_callback(ended)
        try:
            yield
        finally:
            watch.cancel()


async def _within(changed: asyncio.Event, seconds: float) -> None:
    """Until `changed` is set, at most `seconds`. The event is taken before looking: no change can fall between."""
    with suppress(TimeoutError):
        await asyncio.wait_for(changed.wait(), seconds)


def _reply(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"{request.url.path}: {error}") from error


def _number(request: Request, name: str, kind: Callable[[str], Any], default: Any) -> Any:
    text = request.query_params.get(name)
    if text is None:
        if default is None:
            raise ProtocolError(f"{request.url.path}: {name} is missing from the query")
        return default
    try:
        if math.isfinite(value := kind(text)):
            return value
    except (ValueError, OverflowError):
        pass  # said below, as for a value that is not finite
    raise ProtocolError(f"{request.url.path}: {name}={text!r} is not a number")
