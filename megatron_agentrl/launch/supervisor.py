"""Starts the processes of a run, watches them, and stops them. Holds no knowledge of what they compute.

A run ends well when every role that `decides` has exited with 0. Until then any exit of any role is a failure: the
run names it, shows its last log lines, stops the rest and returns 1. Nothing it started outlives it.
"""

from __future__ import annotations

import http.client
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from megatron_agentrl.launch.endpoints import Endpoints, host_of, port_of
from megatron_agentrl.launch.process import Child, Guardian, start
from megatron_agentrl.observe.events import EventLog
from megatron_agentrl.recipe.schema import Recipe

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_HEALTH_PERIOD = 0.25
_TICK = 1.0


@dataclass(frozen=True)
class Role:
    """A process to run. With `health_url` (a server's base URL) it must answer GET /health within `start_deadline` s."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    health_url: str | None = None
    start_deadline: float = 300.0
    decides: bool = False


class Failure(Exception):
    """A part of the run died or came up too late."""


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived."""


def run(
    recipe: Recipe,
    roles: Sequence[Role],
    run_dir: str | Path,
    *,
    on_tick: Callable[[dict[str, str]], None] | None = None,
    err: TextIO | None = None,
) -> int:
    """Runs the roles to their end and returns the exit code (0 well, 1 a part failed, 130 interrupted).

    `on_tick` is called about once a second with each role's state: starting, running or done. Must be called from the
    main thread. `endpoints.json` must stand in `run_dir`.
    """
    supervisor = _Supervisor(recipe, roles, Path(run_dir), on_tick, err or sys.stderr)
    return supervisor.run()


class _Supervisor:
    def __init__(
        self,
        recipe: Recipe,
        roles: Sequence[Role],
        run_dir: Path,
        on_tick: Callable[[dict[str, str]], None] | None,
        err: TextIO,
    ) -> None:
        self.roles = {role.name: role for role in roles}
        assert len(self.roles) == len(roles), "role names must differ"
        assert any(role.decides for role in roles), "some role must decide when the run is over"
        self.run_dir = run_dir
        self.stop_deadline = recipe.deadlines.stop
        self.finish_deadline = recipe.deadlines.start
        self.token = Endpoints.read(run_dir).token
        self.on_tick = on_tick
        self.err = err
        self.children: dict[str, Child] = {}
        self.done: dict[str, float] = {}
        self.unready: set[str] = set()
        self.selector = selectors.DefaultSelector()
        self.events = EventLog(run_dir, "supervisor-0")

    def run(self) -> int:
        guardian = Guardian()
        with _Signals(self.selector):
            try:
                self._start_all(guardian)
                self._watch()
                code = EXIT_OK
            except Failure as failure:
                print(failure, file=self.err, flush=True)
                self.events.point("failure", message=str(failure).splitlines()[0])
                code = EXIT_FAILED
            except Interrupted as interrupted:
                print(f"{interrupted}: stopping the run; start it again to go on", file=self.err, flush=True)
                code = EXIT_INTERRUPTED
            finally:
                self._stop_all(guardian)
        guardian.close()
        self.selector.close()
        self.events.point("end", code=code)
        self.events.close()
        return code

    def _start_all(self, guardian: Guardian) -> None:
        for role in self.roles.values():
            child = start(role.name, role.argv, self.run_dir / "logs" / f"{role.name}.log", role.env)
            guardian.watch(child.pid)
            self.children[role.name] = child
            self.selector.register(child.pidfd, selectors.EVENT_READ, role.name)
            self.events.point("started", role=role.name, pid=child.pid)
        self.started = time.monotonic()
        self.unready = {role.name for role in self.roles.values() if role.health_url}

    def _watch(self) -> None:
        next_tick = next_poll = time.monotonic()
        while len(self.done) < sum(role.decides for role in self.roles.values()):
            until = min(next_tick, next_poll) if self.unready else next_tick
            for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
                if key.data is None:
                    raise Interrupted(_Signals.received(key.fileobj))
                self._ended(key.data)
            now = time.monotonic()
            if self.unready and now >= next_poll:
                self._poll_health()
                next_poll = time.monotonic() + _HEALTH_PERIOD
            if now >= next_tick:
                self._check_finish(now)
                if self.on_tick:
                    self.on_tick(self._states())
                next_tick = time.monotonic() + _TICK

    def _ended(self, name: str) -> None:
        child = self.children[name]
        code = child.exit_code()
        self.selector.unregister(child.pidfd)
        self.events.point("exited", role=name, code=code)
        if code == 0 and self.roles[name].decides:
            self.done[name] = time.monotonic()
            return
        early = " before the run was over" if code == 0 else ""
        raise Failure(self._obituary(child, f"{name} ended{early} with {child.how_it_ended()}; the run stops."))

    def _poll_health(self) -> None:
        for name in sorted(self.unready):
            role = self.roles[name]
            assert role.health_url is not None
            if _healthy(role.health_url, self.token):
                self.unready.discard(name)
                self.events.point("ready", role=name, seconds=round(time.monotonic() - self.started, 3))
            elif (waited := time.monotonic() - self.started) > role.start_deadline:
                what = f"{name} did not answer {role.health_url}/health within {role.start_deadline:g} s (waited {waited:.0f}); the run stops."
                raise Failure(self._obituary(self.children[name], what))

    def _check_finish(self, now: float) -> None:
        """Once one deciding role is done, the others have `deadlines.start` seconds to follow."""
        late = [role.name for role in self.roles.values() if role.decides and role.name not in self.done]
        if self.done and late and now - min(self.done.values()) > self.finish_deadline:
            what = f"{late[0]} is still running {self.finish_deadline:g} s after {min(self.done)} ended well; the run stops."
            raise Failure(self._obituary(self.children[late[0]], what))

    def _obituary(self, child: Child, what: str) -> str:
        lines = child.last_lines()
        return "\n".join([what, f"last {len(lines)} lines of {child.log}:", *(f"  | {line}" for line in lines)])

    def _states(self) -> dict[str, str]:
        return {
            name: "done" if name in self.done else "starting" if name in self.unready else "running"
            for name in self.children
        }

    def _stop_all(self, guardian: Guardian) -> None:
        for child in self.children.values():
            child.terminate()
        deadline = time.monotonic() + self.stop_deadline
        for child in self.children.values():
            _wait(child, deadline)
        for child in self.children.values():  # also what an ended leader has left in its group
            if child.exit_code() is None:
                self.events.point("killed", role=child.name)
            child.kill_group()
            os.close(child.pidfd)
            guardian.forget(child.pid)


def _wait(child: Child, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(child.pidfd, selectors.EVENT_READ)
        if child.exit_code() is None:
            selector.select(max(0.0, deadline - time.monotonic()))


def _healthy(url: str, token: str) -> bool:
    connection = http.client.HTTPConnection(host_of(url), port_of(url), timeout=2.0)
    try:
        connection.request("GET", "/health", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not up yet: the start deadline judges
    finally:
        connection.close()


class _Signals:
    """Turns SIGINT and SIGTERM into a readable socket, so that one `select` waits for everything."""

    NAMES = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector

    def __enter__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.selector.register(self.reader, selectors.EVENT_READ, None)
        self.previous = {number: signal.signal(number, lambda *_: None) for number in self.NAMES}
        self.wakeup = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.selector.unregister(self.reader)
        self.reader.close()
        self.writer.close()

    @staticmethod
    def received(reader: object) -> str:
        assert isinstance(reader, socket.socket)
        return signal.Signals(reader.recv(64)[0]).name
