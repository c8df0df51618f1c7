"""What a publish needs of an engine replica. `rollout/weights_client.py` implements it for vLLM.

Calls block; each takes a deadline in seconds of time.monotonic and raises EngineError, naming the engine and the
phase, when the engine refuses, fails or is late. Versions are non-negative integers; None is the version `none`, the
name of weights that no request may be served with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:  # both bring torch, which those who only need the errors do without
    from megatron_agentrl.weights.manifest import Manifest
    from megatron_agentrl.weights.transport import Rendezvous


class EngineError(RuntimeError):
    """An engine did not do what it was asked. `kind` is a short word: unreachable, late, refused, protocol, …"""

    def __init__(self, engine: str, kind: str, message: str) -> None:
        super().__init__(f"{engine}: {message}")
        self.engine = engine
        self.kind = kind


class Staging(msgspec.Struct, frozen=True):
    """How far one worker is with receiving: `state` is idle, receiving, complete or failed (then `error` says why)."""

    state: str
    version: int | None = None
    received: int = 0
    expected: int = 0
    nbytes: int = 0
    error: str = ""


class Engine(Protocol):
    name: str
    workers: int
    """Worker processes of the replica that receive weights (tensor-parallel ranks)."""

    def begin_staging(
        self, version: int, manifest: Manifest, rendezvous: Rendezvous | None, seconds: float, deadline: float
    ) -> None:
        """Starts, and does not wait for, a thread in each worker that receives `version` beside generation.

        `rendezvous` makes it open a new channel first; None takes the one it has. `seconds` bounds the reception.
        """
        ...

    def staging(self, deadline: float) -> list[Staging]:
        """One entry per worker."""
        ...

    def pause(self, clear_cache: bool, deadline: float) -> None:
        """Freezes requests in flight, where they are; new ones queue. Returns once no step is running."""
        ...

    def install(self, version: int, deadline: float) -> None:
        """Loads the staged version. Call it paused. The engine's version is `none` until it succeeded."""
        ...

    def resume(self, deadline: float) -> None: ...

    def withdraw(self, deadline: float) -> None:
        """Names the present weights `none` and ends the requests in flight with an error."""
        ...

    def score(self, token_ids: Sequence[int], deadline: float) -> list[float]:
        """ln p(token_ids[t] | token_ids[:t]) at temperature 1 for t = 1 … len−1, computed afresh (no prefix cache)."""
        ...
