"""The engines of a run as one: where a request goes, and which replies may be believed yet.

A request goes to the serving engine with the fewest requests in flight; while none serves, it waits. A reply may carry
tokens of a version that its engine has installed and not yet proven: the pool holds that reply until the version is
proven (then it is returned) or withdrawn (then it is an error). Only one event loop may use a pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from megatron_agentrl.rollout.client import GenerateReply, VllmClient
from megatron_agentrl.weights.engine import EngineError

#: serving: proven weights. held: a version is being installed or proven. quarantined: it failed its canary.
#: none: no usable weights (before the first publish, or after a failed install).
STATES = ("serving", "held", "quarantined", "none")


class Announcement(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    state: str
    version: int | None = None


class GenerateClient(Protocol):
    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int] = ()
    ) -> GenerateReply: ...

    async def close(self) -> None: ...


@dataclass
class PooledEngine:
    """One engine of the pool. `busy` holds [t0, t1) with ≥ 1 request in flight.

    `proven` are the versions it has proven; `trusted` is that set as it was at the latest of `withdrawals`, and the
    only one a request that saw a withdrawal may carry.
    """

    name: str
    client: GenerateClient
    url: str = ""
    state: str = "none"
    version: int | None = None
    proven: set[int] = field(default_factory=set)
    trusted: frozenset[int] = frozenset()
    withdrawals: int = 0
    in_flight: int = 0
    requests: int = 0
    tokens: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)
    busy_since: float | None = None


class EnginePool:
    """Routes requests over engines. Times are time.time(), so that intervals of several processes compare."""

    def __init__(self, token: str = "", *, timeout: float = 120.0, wait: float = 120.0) -> None:
        """`token` and `timeout` (seconds of a request) are for the clients that `update` makes; `wait` is the seconds
        a request may wait for a serving engine, and a reply for its version to be proven."""
        self._token = token
        self._timeout = timeout
        self._wait = wait
        self._engines: dict[str, PooledEngine] = {}
        self._changed = asyncio.Event()  # set and replaced at each change

    @property
    def engines(self) -> dict[str, PooledEngine]:
        return self._engines

    async def add(self, name: str, client: GenerateClient, url: str = "") -> None:
        """Adds an engine in state `none`, or replaces the client of the one with that name (it restarted)."""
        old = self._engines.get(name)
        self._engines[name] = PooledEngine(name, client, url)
        if old is not None:
            self._withdraw(old)
            await old.client.close()

    async def update(self, name: str, body: dict[str, Any]) -> None:
        """Takes the body of `PUT /engines/NAME`: {"url", "state", "version"}. An engine that is new or moved is added.

        Raises ValueError for a body that is not one.
        """
        try:
            asked = msgspec.convert(body, Announcement)
        except msgspec.ValidationError as error:
            raise ValueError(f"engine {name}: {error}") from error
        _check_state(name, asked.state, asked.version)
        known = self._engines.get(name)
        if known is None or known.url != asked.url:
            await self.add(name, VllmClient(name, asked.url, self._token, self._timeout), asked.url)
        self.set_state(name, asked.state, asked.version)

    def set_state(self, name: str, state: str, version: int | None = None) -> None:
        """Raises ValueError for an unknown engine or state, or for `serving` without a version."""
        if name not in self._engines:
            raise ValueError(f"unknown engine {name!r}; known are {sorted(self._engines)}")
        _check_state(name, state, version)
        engine = self._engines[name]
        engine.state = state
        if state == "serving" and version is not None:
            engine.version = version
            engine.proven.add(version)
        elif state in ("quarantined", "none"):
            self._withdraw(engine)
        self._notify()

    def _withdraw(self, engine: PooledEngine) -> None:
        engine.withdrawals += 1
        engine.trusted = frozenset(engine.proven)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def remove(self, name: str) -> None:
        engine = self._engines.pop(name)
        self._withdraw(engine)
        await engine.client.close()

    async def close(self) -> None:
        for name in list(self._engines):
            await self.remove(name)

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int] = ()
    ) -> GenerateReply:
        """As `VllmClient.generate`; raises EngineError also when no engine serves, or a version is not proven, in time."""
        deadline = time.monotonic() + self._wait
        engine = await self._choose(deadline)
        withdrawals = engine.withdrawals
        self._enter(engine)
        try:
            reply = await engine.client.generate(
                token_ids, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids
            )
        finally:
            self._leave(engine)
        engine.requests += 1
        engine.tokens += len(reply.ids)
        await self._await_proof(engine, set(reply.versions), withdrawals)
        return reply

    async def _choose(self, deadline: float) -> PooledEngine:
        # An engine that is installing takes requests when no other can: they queue in it for a moment.
        while True:
            for state in ("serving", "held"):
                open_to_requests = [e for e in self._engines.values() if e.state == state]
                if open_to_requests:
                    return min(open_to_requests, key=lambda e: e.in_flight)
            await self._wait_for_change(
                deadline, "pool", f"no engine serves within {self._wait:g} s: {self._describe()}"
            )

    async def _await_proof(self, engine: PooledEngine, versions: set[int], withdrawals: int) -> None:
        deadline = time.monotonic() + self._wait
        while True:
            if engine.withdrawals != withdrawals:
                if versions <= engine.trusted:
                    return
                unproven = sorted(versions - engine.trusted)
                raise EngineError(engine.name, "quarantined", f"versions {unproven} were withdrawn, not proven")
            if versions <= engine.proven:
                return
            unproven = sorted(versions - engine.proven)
            await self._wait_for_change(
                deadline, engine.name, f"versions {unproven} were not proven within {self._wait:g} s"
            )

    async def _wait_for_change(self, deadline: float, who: str, message: str) -> None:
        changed = self._changed  # taken before the first await, so no change goes unseen
        try:
            await asyncio.wait_for(changed.wait(), max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise EngineError(who, "late", message) from error

    def _describe(self) -> str:
        return ", ".join(f"{e.name} is {e.state}" for e in self._engines.values()) or "the pool is empty"

    def _enter(self, engine: PooledEngine) -> None:
        engine.in_flight += 1
        if engine.in_flight == 1:
            engine.busy_since = time.time()

    def _leave(self, engine: PooledEngine) -> None:
        engine.in_flight -= 1
        if engine.in_flight == 0 and engine.busy_since is not None:
            engine.busy.append((engine.busy_since, time.time()))
            engine.busy_since = None

    def take_busy(self) -> dict[str, list[tuple[float, float]]]:
        """Busy intervals per engine since the last call; one that is still open is cut at now."""
        now = time.time()
        taken: dict[str, list[tuple[float, float]]] = {}
        for engine in self._engines.values():
            intervals, engine.busy = engine.busy, []
            if engine.busy_since is not None:
                intervals.append((engine.busy_since, now))
                engine.busy_since = now
            taken[engine.name] = intervals
        return taken


def _check_state(name: str, state: str, version: int | None) -> None:
    if state not in STATES:
        raise ValueError(f"{name}: engine state {state!r}; expected one of {', '.join(STATES)}")
    if state == "serving" and version is None:
        raise ValueError(f"{name}: serving needs the version that is proven")
