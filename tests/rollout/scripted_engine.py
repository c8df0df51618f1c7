"""An engine for tests: vLLM's routes and our staging, with a rule in the place of a model.

The rule makes what it samples depend on what was installed: the next token is a fixed function of the last one and the
position, its logprob also of the mean of the installed tensors. `Faults` breaks single routes. The server runs in a
thread of the test's process, or (``python scripted_engine.py PORT``) in one of its own, to be killed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from aiohttp import web

from megatron_agentrl.weights.staging import BeginStaging, StagingArea

TOKEN = "scripted-token"
VOCABULARY = 97


def next_token(last: int, position: int) -> int:
    return (last * 31 + position * 7 + 3) % VOCABULARY


def logprob(last: int, token: int, weight: float) -> float:
    """ln p(token | last) under installed tensors whose mean is `weight`."""
    return -1.0 - ((last * 13 + token * 5) % 11) / 10 - weight


def score(token_ids: Sequence[int], weight: float) -> list[float]:
    return [logprob(a, b, weight) for a, b in zip(token_ids, token_ids[1:], strict=False)]


def mean(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([t.double().flatten() for t in tensors.values()]).mean())


@dataclass
class Faults:
    """`status` and `delay` by route: what to answer, and seconds to wait before. `stale_install`: nothing is loaded.
    `drop`: fields left out of generate's choices. `stop_after` ends replies with that finish_reason."""

    status: dict[str, int] = field(default_factory=dict)
    delay: dict[str, float] = field(default_factory=dict)
    stale_install: bool = False
    drop: tuple[str, ...] = ()
    finish_reason: str | None = None


class ScriptedEngine:
    """`seconds_per_token` paces sampling; `calls` lists the routes that were called, in order (generate left out)."""

    def __init__(self, name: str = "engine-0", version: str = "default", seconds_per_token: float = 0.0) -> None:
        self.name = name
        self.version = version
        self.weight = 0.0
        self.seconds_per_token = seconds_per_token
        self.faults = Faults()
        self.calls: list[str] = []
        self.paused = False
        self.aborts = 0
        self.staging = StagingArea(1)
        self.url = ""
        self._ready = threading.Event()

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self, port: int = 0) -> ScriptedEngine:
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self.staging.close()

    def __enter__(self) -> ScriptedEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        app = web.Application(middlewares=[self._around], client_max_size=64 << 20)
        app.add_routes(
            [web.get("/health", self._ok), web.get("/weight_info", self._weight_info)]
            + [web.get("/is_paused", self._is_paused)]
            + [web.post(path, getattr(self, handler)) for path, handler in _POSTS.items()]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", port)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    @web.middleware
    async def _around(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401, text="token")
        if request.path != "/inference/v1/generate":
            self.calls.append(request.path)
        if delay := self.faults.delay.get(request.path):
            await asyncio.sleep(delay)
        if status := self.faults.status.get(request.path):
            return web.Response(status=status, text=f"scripted failure of {request.path}")
        try:
            return await handler(request)
        except RuntimeError as error:
            return web.Response(status=500, text=str(error))

    # ---- routes --------------------------------------------------------------------------------------------------

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        return web.json_response({})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({})

    async def _start_update(self, request: web.Request) -> web.Response:
        assert self.paused, "an update needs a pause"
        self.staging.require()
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        tensors = self.staging.take((await request.json())["update_info"]["version"])
        if not self.faults.stale_install:
            self.weight = mean(tensors)
        return web.json_response({})

    async def _finish_update(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        return web.json_response({})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "stage_begin":
            self.staging.begin(msgspec.json.decode(body["args"][0], type=BeginStaging))
            return web.json_response({"results": [None]})
        return web.json_response({"results": [msgspec.to_builtins(self.staging.status())]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt, sampling = body["token_ids"], body["sampling_params"]
        ids: list[int] = []
        logprobs: list[float] = []
        stamps: list[str] = []
        aborts = self.aborts
        reason = "length"
        while len(ids) < sampling["max_tokens"]:
            while self.paused and self.aborts == aborts:
                await asyncio.sleep(0.002)
            if self.aborts != aborts:
                reason = "abort"
                break
            if self.seconds_per_token:
                await asyncio.sleep(self.seconds_per_token)
                if self.paused:
                    continue
            last = (prompt + ids)[-1]
            token = next_token(last, len(prompt) + len(ids))
            ids.append(token)
            logprobs.append(logprob(last, token, self.weight))
            stamps.append(self.version)
            if token in sampling.get("stop_token_ids", []):
                reason = "stop"
                break
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": self.faults.finish_reason or reason,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": t, "logprob": v} for t, v in zip(ids, logprobs, strict=True)]},
            "weight_versions": _spans(stamps),
        }
        for name in self.faults.drop:
            choice.pop(name)
        reply: dict[str, Any] = {"request_id": "r", "choices": [choice]}
        if sampling.get("prompt_logprobs") is not None:
            values = score(prompt, self.weight)
            reply["prompt_logprobs"] = [None] + [
                {str(t): {"logprob": v, "rank": 1, "decoded_token": None}}
                for t, v in zip(prompt[1:], values, strict=True)
            ]
        return web.json_response(reply)


def _spans(stamps: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for i, stamp in enumerate(stamps):
        if not spans or spans[-1]["version"] != stamp:
            spans.append({"version": stamp, "start": i, "end": i + 1})
        spans[-1]["end"] = i + 1
    return spans


_POSTS = {
    "/pause": "_pause",
    "/resume": "_resume",
    "/abort_requests": "_abort",
    "/update_weight_version": "_set_version",
    "/start_weight_update": "_start_update",
    "/update_weights": "_update",
    "/finish_weight_update": "_finish_update",
    "/collective_rpc": "_rpc",
    "/inference/v1/generate": "_generate",
}


if __name__ == "__main__":
    ScriptedEngine().start(int(sys.argv[1]))
    time.sleep(120)
