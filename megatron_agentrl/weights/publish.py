"""Publishing a policy version to the engines: stage, install, prove. Run by the trainer's rank 0.

    stage    each engine receives the version in a thread, while it generates with the old one
    pause    requests in flight freeze where they are
    install  the engine loads what it staged; from here to success its version is `none`
    resume   generation goes on with the new version
    canary   the engine scores fixed sequences; its logprobs must be the trainer's

A failure before `install` leaves the old version in force. A failure in `install` leaves version `none`; a failed
canary quarantines the engine, also as version `none`. Both end at the next publish that succeeds. One engine's failure
does not touch the others. Everything happens under one deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from megatron_agentrl.weights.engine import Engine, EngineError
from megatron_agentrl.weights.manifest import Manifest
from megatron_agentrl.weights.stream import Sender
from megatron_agentrl.weights.transport import Channel, Rendezvous, Transport, TransportError

PHASES = ("stage", "pause", "install", "resume", "canary")

#: Called as (engine, state, version): held (installing or unproven), serving, quarantined, none.
OnState = Callable[[str, str, int | None], None]


@dataclass
class Canary:
    """Fixed sequences and the trainer's logprobs of them.

    logprobs[s][t−1] = ln p(sequences[s][t] | sequences[s][:t]) at temperature 1 for t = 1 … len−1; or a function that
    computes them, called once, when all engines hold the version and none has been paused yet.
    """

    sequences: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | Callable[[], Sequence[Sequence[float]]]

    def expected(self) -> Sequence[Sequence[float]]:
        values = self.logprobs() if callable(self.logprobs) else self.logprobs
        for sequence, row in zip(self.sequences, values, strict=True):
            if len(row) != len(sequence) - 1:
                raise ValueError(f"a canary sequence of {len(sequence)} tokens has {len(row)} logprobs")
        return values


@dataclass
class EngineOutcome:
    """What a publish did to one engine. Seconds are by phase; `gap` is the canary's largest |trainer − engine|."""

    engine: str
    state: str = "unchanged"
    """`proven`, `unchanged` (failed before install), `none` (failed in install or after) or `quarantined`."""
    phase: str = "stage"
    """The phase it reached, or failed in."""
    error: str | None = None
    gap: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class PublishReport:
    version: int
    nbytes: int
    seconds: dict[str, float]
    """By phase the slowest engine's time; `reference`: the trainer's own canary logprobs; `total`.

    An engine generates nothing during pause + install + resume.
    """
    engines: dict[str, EngineOutcome]

    @property
    def proven(self) -> list[str]:
        return [name for name, outcome in self.engines.items() if outcome.state == "proven"]

    @property
    def gap(self) -> float | None:
        """Largest canary gap over the engines that were compared."""
        return max((o.gap for o in self.engines.values() if o.gap is not None), default=None)

    def problems(self) -> list[str]:
        return [f"{o.phase}: {o.error}" for o in self.engines.values() if o.error is not None]


class Publisher:
    """Keeps the channels to the engines from publish to publish. Not thread-safe."""

    def __init__(
        self,
        engines: Sequence[Engine],
        transport: Transport,
        *,
        tolerance: float,
        deadline: float,
        clear_cache: bool = True,
        on_state: OnState = lambda engine, state, version: None,
    ) -> None:
        """`deadline` is the seconds a whole publish may take, `tolerance` the largest gap a canary may show."""
        self.engines = {engine.name: engine for engine in engines}
        self._transport = transport
        self._tolerance = tolerance
        self._seconds = deadline
        self._clear_cache = clear_cache
        self._on_state = on_state
        self._channels: dict[str, Channel] = {}

    def publish(
        self, version: int, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary
    ) -> PublishReport:
        """Brings `version` to every engine; the report says where it is proven.

        `tensors` is consumed one at a time, to its end, in manifest order. Raises ManifestError when it yields
        anything else, and what it raises itself; no engine has changed then.
        """
        begin = time.monotonic()
        deadline = begin + self._seconds
        outcomes = {name: EngineOutcome(name) for name in self.engines}
        with ThreadPoolExecutor(max_workers=max(1, len(self.engines)), thread_name_prefix="publish") as pool:
            self._stage(version, manifest, tensors, outcomes, deadline, pool)
            reference = time.monotonic()
            expected = canary.expected()
            reference = time.monotonic() - reference
            staged = [self.engines[name] for name, outcome in outcomes.items() if outcome.error is None]
            list(
                pool.map(
                    lambda engine: self._install_and_prove(
                        engine, version, canary.sequences, expected, outcomes[engine.name], deadline
                    ),
                    staged,
                )
            )
        seconds = {phase: max(o.seconds.get(phase, 0.0) for o in outcomes.values()) for phase in PHASES}
        seconds["reference"] = reference
        seconds["total"] = time.monotonic() - begin
        return PublishReport(version, manifest.nbytes, seconds, outcomes)

    def close(self) -> None:
        for name in list(self._channels):
            self._drop_channel(name)

    # ---- staging -------------------------------------------------------------------------------------------------

    def _stage(
        self,
        version: int,
        manifest: Manifest,
        tensors: Iterable[tuple[str, torch.Tensor]],
        outcomes: dict[str, EngineOutcome],
        deadline: float,
        pool: ThreadPoolExecutor,
    ) -> None:
        begin = time.monotonic()
        patience = begin + (deadline - begin) / 2  # one that does not join must leave the others time for the rest

        def join(engine: Engine) -> None:
            with _phase(outcomes[engine.name], "stage", deadline):
                self._join(engine, version, manifest, patience, deadline)

        list(pool.map(join, self.engines.values()))
        joined = {name: self._channels[name] for name, o in outcomes.items() if o.error is None}
        sender = Sender(manifest, joined, deadline)
        answers: dict[str, list[tuple[bool, int]]] = {}
        try:
            sender.send(tensors)
            answers = sender.acknowledged()
        finally:
            for name in sender.failures:
                self._drop_channel(name)
        for name in joined:
            outcome = outcomes[name]
            outcome.seconds["stage"] = time.monotonic() - begin
            with _phase(outcome, "stage", deadline):
                if name in sender.failures:
                    raise EngineError(name, "unreachable", f"{sender.failures[name]}; {self._ask(name)}")
                if not all(intact for intact, _ in answers[name]):
                    raise EngineError(name, "incomplete", self._ask(name))

    def _join(self, engine: Engine, version: int, manifest: Manifest, patience: float, deadline: float) -> None:
        """Tells the engine to receive, over the channel there is or a new one; waits for it until `patience`."""
        rendezvous: Rendezvous | None = None
        if engine.name not in self._channels:
            rendezvous = self._transport.invite(engine.name, 1 + engine.workers)
        try:
            engine.begin_staging(version, manifest, rendezvous, deadline - time.monotonic(), patience)
            if rendezvous is not None:
                self._channels[engine.name] = self._transport.open(rendezvous, 0, patience)
        except TransportError as error:
            raise EngineError(engine.name, "unreachable", str(error)) from error
        except EngineError:
            self._drop_channel(engine.name)  # an engine that restarted has lost its end
            raise

    def _ask(self, name: str) -> str:
        """What the engine says of its own staging, for the error message."""
        try:
            states = self.engines[name].staging(time.monotonic() + 2.0)
        except EngineError as error:
            return f"no word from it ({error})"
        return "; ".join(f"{s.state}, {s.received} of {s.expected} tensors {s.error}".strip() for s in states)

    def _drop_channel(self, name: str) -> None:
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.abort()

    # ---- installing ----------------------------------------------------------------------------------------------

    def _install_and_prove(
        self,
        engine: Engine,
        version: int,
        sequences: Sequence[Sequence[int]],
        expected: Sequence[Sequence[float]],
        outcome: EngineOutcome,
        deadline: float,
    ) -> None:
        with _phase(outcome, "pause", deadline):
            engine.pause(self._clear_cache, deadline)
        if outcome.error is not None:
            self._after_failure(engine, "unchanged", outcome, resume=True)
            return
        self._on_state(engine.name, "held", version)
        with _phase(outcome, "install", deadline):
            engine.install(version, deadline)
        if outcome.error is None:
            with _phase(outcome, "resume", deadline):
                engine.resume(deadline)
        if outcome.error is not None:  # stays paused: what it would compute with is neither version
            self._after_failure(engine, "none", outcome, resume=False)
            return
        with _phase(outcome, "canary", deadline):
            with ThreadPoolExecutor(max_workers=max(1, len(sequences)), thread_name_prefix="canary") as pool:
                scored = list(pool.map(lambda sequence: engine.score(sequence, deadline), sequences))
            outcome.gap, where = largest_gap(expected, scored)
            if not outcome.gap <= self._tolerance:
                raise EngineError(
                    engine.name,
                    "canary",
                    f"version {version} differs from the trainer by {outcome.gap:.3g} nats at {where} "
                    f"(allowed: {self._tolerance:g}); quarantined",
                )
        if outcome.error is None:
            outcome.state = "proven"
            self._on_state(engine.name, "serving", version)
        else:
            self._after_failure(engine, "quarantined", outcome, resume=False)

    def _after_failure(self, engine: Engine, state: str, outcome: EngineOutcome, *, resume: bool) -> None:
        """Leaves the engine in a state that its name tells. It may be the engine that is gone, so errors are noted."""
        outcome.state = state
        if state != "unchanged":
            self._on_state(engine.name, state, None)
        deadline = time.monotonic() + 5.0
        try:
            if resume:
                engine.resume(deadline)
            if state != "unchanged":
                engine.withdraw(deadline)
        except EngineError as error:
            outcome.error = f"{outcome.error}; then {error}"


class _phase:
    """Times a phase of one engine and turns its EngineError into the outcome's error."""

    def __init__(self, outcome: EngineOutcome, phase: str, deadline: float) -> None:
        self._outcome = outcome
        self._phase = phase
        self._deadline = deadline

    def __enter__(self) -> None:
        self._outcome.phase = self._phase
        self._begin = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        now = time.monotonic()
        self._outcome.seconds.setdefault(self._phase, now - self._begin)
        if not isinstance(error, EngineError):
            return False
        late = " (the publish deadline passed)" if now >= self._deadline else ""
        self._outcome.error = f"{error}{late}"
        return True


def largest_gap(expected: Sequence[Sequence[float]], scored: Sequence[Sequence[float]]) -> tuple[float, str]:
    """Largest |expected − scored| and its place. A logprob that is not finite, on either side, gives an infinite gap."""
    worst, where = 0.0, "no token"
    for s, (row, found) in enumerate(zip(expected, scored, strict=True)):
        for t, (a, b) in enumerate(zip(row, found, strict=True), start=1):
            gap = abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf
            if gap > worst or where == "no token":
                worst, where = gap, f"sequence {s}, position {t}"
    return worst, where
