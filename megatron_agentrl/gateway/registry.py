"""The gateway's sessions: opened and finished with keys, dropped when nobody finishes them.

Keys are random secrets. The agent's key only reaches its own session's chat endpoint; the control key,
which the agent never sees, finishes the session and sets its reward. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_agentrl.chat.sampling import SamplingContract
from megatron_agentrl.gateway.session import Policy, Session
from megatron_agentrl.trajectory.types import NOT_SAMPLED, STATUSES, Receipt, Trajectory, Where

#: Statuses of trajectories that carry a reward.
SCORED = ("ok", "over_length")
#: Receipts kept so that a repeated finish gets the same answer.
KEEP_RECEIPTS = 4096


class SessionError(Exception):
    """A session cannot be reached or changed as asked. `status` is the HTTP status it stands for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Interaction:
    """One request in progress or answered, shared by a request and its retries."""

    body_digest: bytes
    task: asyncio.Task[bytes]
    waiters: int = 0


@dataclass
class OpenSession:
    """A session with its names, keys and running requests."""

    rollout_id: str
    task_id: str
    sample: int
    kind: str
    api_key: str
    control_key: str
    session: Session
    touched: float
    interactions: dict[str, Interaction] = field(default_factory=dict)
    running: set[asyncio.Task[bytes]] = field(default_factory=set)
    #: What the engine's last failure was, until a later turn succeeds.
    engine_failure: str | None = None


class Registry:
    """All open sessions of a gateway.

    write  stores a finished trajectory and says where (None: nothing is stored)
    """

    def __init__(self, policy: Policy, write: Callable[[Trajectory], Where | None], clock: Callable[[], float] = time.monotonic):
        self._policy = policy
        self._write = write
        self._clock = clock
        self._open: dict[str, OpenSession] = {}
        self._receipts: OrderedDict[str, tuple[str, Receipt]] = OrderedDict()
        self.splits: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, task_id: str, sample: int, kind: str, contract: SamplingContract) -> OpenSession:
        """A new session with fresh keys."""
        made = OpenSession(
            rollout_id=secrets.token_hex(16),
            task_id=task_id,
            sample=sample,
            kind=kind,
            api_key=secrets.token_urlsafe(24),
            control_key=secrets.token_urlsafe(24),
            session=Session(self._policy, contract),
            touched=self._clock(),
        )
        self._open[made.rollout_id] = made
        return made

    def for_agent(self, rollout_id: str, api_key: str) -> OpenSession:
        """The session that the agent's key opens. Raises SessionError 404 or 401."""
        found = self._find(rollout_id)
        if not hmac.compare_digest(found.api_key.encode(), api_key.encode()):
            raise SessionError(401, "this key does not open this session")
        found.touched = self._clock()
        return found

    def finish(
        self, rollout_id: str, control_key: str, status: str, reward: float | None, metrics: dict[str, float], message: str
    ) -> Receipt:
        """Ends a session: stops its running requests, stores the trajectory, gives the receipt.

        Repeating a finish gives the first receipt again. Raises SessionError 401, 404 or 400.
        """
        if rollout_id in self._receipts:
            key, receipt = self._receipts[rollout_id]
            if not hmac.compare_digest(key.encode(), control_key.encode()):
                raise SessionError(401, "this key does not control this session")
            return receipt
        found = self._find(rollout_id)
        if not hmac.compare_digest(found.control_key.encode(), control_key.encode()):
            raise SessionError(401, "this key does not control this session")
        if status not in STATUSES:
            raise SessionError(400, f"status {status!r}: expected one of {', '.join(STATUSES)}")
        if (status in SCORED) != (reward is not None):
            raise SessionError(400, f"status {status} with reward {reward}: exactly {' and '.join(SCORED)} carry a reward")
        _stop(found)
        if found.engine_failure is not None and status in ("ok", "agent_error"):
            # The last thing the agent got from the policy was our failure: whatever it made of that is no score.
            status, reward, message = "engine_error", None, found.engine_failure
        if status == "ok" and found.session.over_length:
            status = "over_length"
        receipt = self._receipt(found, status, reward, metrics, message)
        del self._open[rollout_id]
        self._receipts[rollout_id] = (control_key, receipt)
        if len(self._receipts) > KEEP_RECEIPTS:
            self._receipts.popitem(last=False)
        return receipt

    def expire(self, idle_seconds: float) -> None:
        """Drops sessions that nobody touched for so long (their worker is gone)."""
        limit = self._clock() - idle_seconds
        for found in [one for one in self._open.values() if one.touched < limit and not one.running]:
            del self._open[found.rollout_id]
            _stop(found)
            self.expired += 1

    def _find(self, rollout_id: str) -> OpenSession:
        if (found := self._open.get(rollout_id)) is None:
            raise SessionError(404, "no such session, or it is finished")
        return found

    def _receipt(
        self, found: OpenSession, status: str, reward: float | None, metrics: dict[str, float], message: str
    ) -> Receipt:
        trajectory = found.session.trajectory(found.rollout_id, found.task_id, found.sample, status, reward, metrics)
        where = self._write(trajectory) if status in SCORED else None
        sampled = Counter(v for segment in trajectory.segments for v in segment.versions if v != NOT_SAMPLED)
        self.splits.update(found.session.splits)
        self.finished[status] += 1
        return Receipt(
            rollout_id=found.rollout_id,
            task_id=found.task_id,
            sample=found.sample,
            status=status,
            reward=reward,
            engine=trajectory.engine,
            lengths=[len(segment.token_ids) for segment in trajectory.segments],
            sampled=dict(sampled),
            where=where,
            metrics=metrics,
            message=message,
        )


def _stop(found: OpenSession) -> None:
    """Cancels what still runs; a cancelled turn is never recorded."""
    for task in found.running:
        task.cancel()
    found.interactions.clear()
