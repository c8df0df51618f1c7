"""Agent worker: takes groups from the coordinator, runs the user's agent, hands receipts back.

One event loop per process. Each trajectory has a gateway session of its own; what the agent makes of it
is a reward, or a failure of a kind (never a reward of 0). Holds no tokens and knows no engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
import openai

from megatron_agentrl.agent.endpoint import Endpoint, shared_client
from megatron_agentrl.agent.env import EnvironmentFailure
from megatron_agentrl.agent.types import Agent, Result, Task
from megatron_agentrl.trajectory.types import Receipt

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest failure message that travels in a receipt, in characters.
MESSAGE_LENGTH = 500
#: Receipts of one POST, and seconds that the first of them waits for others.
RECEIPT_BATCH = 256
RECEIPT_LINGER = 0.01
#: Seconds between attempts to reach a peer that does not answer.
RETRY_PAUSE = 0.2


class PeerLost(RuntimeError):
    """The coordinator or the gateway did not answer within the deadline."""


class PeerRefused(RuntimeError):
    """The coordinator or the gateway answered with an error."""


@dataclass(frozen=True)
class WorkerSettings:
    """Where the peers are and what a worker may do.

    timeout     seconds one trajectory may take
    patience    seconds a peer may be silent before the worker gives up
    """

    name: str
    coordinator: str
    gateway: str
    run_token: str
    concurrency: int
    timeout: float
    max_turns: int
    patience: float = 30.0


class WorkTask(msgspec.Struct):
    """A prompt as the coordinator sends it."""

    task_id: str
    messages: list[dict[str, Any]]
    answer: str | None = None
    metadata: dict[str, Any] = {}


class WorkGroup(msgspec.Struct):
    """Samples of one prompt to run."""

    task_id: str
    kind: str
    samples: list[int]
    task: WorkTask
    temperature: float | None = None


class Work(msgspec.Struct):
    """Reply of `POST /work`."""

    groups: list[WorkGroup]
    stop: bool = False


class OpenedSession(msgspec.Struct):
    """Reply of the gateway's `POST /sessions`."""

    rollout_id: str
    session_url: str
    openai_base_url: str
    api_key: str
    control_key: str


@dataclass(frozen=True)
class _Outcome:
    status: str
    reward: float | None = None
    metrics: dict[str, float] | None = None
    message: str = ""


class Worker:
    """Runs `agent` until the coordinator says stop. `run` raises PeerLost or PeerRefused, naming the peer."""

    def __init__(self, settings: WorkerSettings, agent: Agent) -> None:
        self._settings = settings
        self._agent = agent
        self._running: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Queue[Receipt] = asyncio.Queue()

    async def run(self) -> None:
        """Works until told to stop; what still runs then is cancelled, and its sessions are closed by the gateway."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            self._session = session
            self._http = shared_client(session, self._settings.timeout)
            async with asyncio.TaskGroup() as group:
                poster = group.create_task(self._post_receipts())
                await self._take_work(group)
                for task in self._running:
                    task.cancel()
                poster.cancel()

    async def _take_work(self, group: asyncio.TaskGroup) -> None:
        settings = self._settings
        while True:
            while (free := settings.concurrency - len(self._running)) <= 0:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            work = await self._call(
                "coordinator", settings.coordinator + "/work", settings.run_token, {"worker": settings.name, "max": free}, _work
            )
            for one in work.groups:
                for sample in one.samples:
                    task = group.create_task(self._run_sample(one, sample))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
            if work.stop:
                return

    async def _run_sample(self, group: WorkGroup, sample: int) -> None:
        settings = self._settings
        sampling = {} if group.temperature is None else {"temperature": group.temperature}
        opened = await self._call(
            "gateway",
            settings.gateway + "/sessions",
            settings.run_token,
            {"task_id": group.task_id, "sample": sample, "kind": group.kind, "sampling": sampling},
            _opened,
        )
        endpoint = Endpoint(opened.openai_base_url, opened.api_key, settings.max_turns, self._session, self._http)
        outcome = await self._outcome(group.task, endpoint)
        receipt = await self._call(
            "gateway",
            opened.session_url + "/finish",
            opened.control_key,
            {"status": outcome.status, "reward": outcome.reward, "metrics": outcome.metrics or {}, "message": outcome.message},
            _receipt,
        )
        self._finished.put_nowait(receipt)

    async def _outcome(self, work: WorkTask, endpoint: Endpoint) -> _Outcome:
        """Runs the agent once. Everything it can raise becomes a failure of a kind."""
        task = Task(work.task_id, work.messages, work.answer, work.metadata)
        limit = asyncio.timeout(self._settings.timeout)
        current = asyncio.current_task()
        assert current is not None
        try:
            async with limit:
                result = await self._agent.run(task, endpoint)
            reward, metrics = _numbers(result)
            return _Outcome("ok", reward, metrics)
        except EnvironmentFailure as error:
            return self._failure("environment_error", task, error)
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            return self._failure("engine_error", task, error)
        # The user's code: whatever it raises is this trajectory's failure and must not end the others. That includes
        # the exit() of code it executes, and a cancellation of its own making (this task then was not asked to end).
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and current.cancelling():
                raise
            if limit.expired():
                return _Outcome("timeout", message=f"the agent took longer than {self._settings.timeout:g} s")
            return self._failure("agent_error", task, error)

    def _failure(self, status: str, task: Task, error: BaseException) -> _Outcome:
        log.warning("%s on task %s", status, task.task_id, exc_info=error)
        try:
            words = str(error).encode(errors="replace").decode()
        except Exception as problem:  # the user's class may be as broken as its code
            words = f"(str() of it raises {type(problem).__name__})"
        return _Outcome(status, message=f"{type(error).__name__}: {words}"[:MESSAGE_LENGTH])

    async def _post_receipts(self) -> None:
        settings = self._settings
        while True:
            batch = [await self._finished.get()]
            await asyncio.sleep(RECEIPT_LINGER)
            while len(batch) < RECEIPT_BATCH and not self._finished.empty():
                batch.append(self._finished.get_nowait())
            await self._call("coordinator", settings.coordinator + "/receipts", settings.run_token, batch, _accepted)

    async def _call(self, peer: str, url: str, key: str, body: Any, decoder: msgspec.json.Decoder[T]) -> T:
        """POSTs JSON and decodes the reply. A peer that cannot be reached is tried again for `patience` seconds.

        Repeating is safe: finishing twice gives one receipt, a receipt counts once, and a session or a
        group whose reply was lost is given up by its owner's own deadline.
        """
        data = _encode(body)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        deadline = time.monotonic() + self._settings.patience
        while True:
            try:
                timeout = aiohttp.ClientTimeout(total=self._settings.patience)
                async with self._session.post(url, data=data, headers=headers, timeout=timeout) as response:
                    payload = await response.read()
                    status = response.status
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() + RETRY_PAUSE > deadline:
                    reason = f"{type(error).__name__}: {error}"
                    raise PeerLost(f"the {peer} at {url} did not answer for {self._settings.patience:g} s ({reason})") from error
                await asyncio.sleep(RETRY_PAUSE)
        if status != 200:
            raise PeerRefused(f"the {peer} answered {status} to {url}: {payload[:MESSAGE_LENGTH].decode(errors='replace')}")
        return decoder.decode(payload)


_encode = msgspec.json.Encoder().encode
_work = msgspec.json.Decoder(Work)
_opened = msgspec.json.Decoder(OpenedSession)
_receipt = msgspec.json.Decoder(Receipt)
_accepted = msgspec.json.Decoder(dict[str, Any])


def _numbers(result: Any) -> tuple[float, dict[str, float]]:
    """Reward and metrics of a Result as finite numbers. Raises TypeError or ValueError for anything else."""
    if not isinstance(result, Result):
        raise TypeError(f"the agent returned {type(result).__name__}; a Result was expected")
    metrics = {_metric_name(name): _finite(value, f"metric {name!r}") for name, value in result.metrics.items()}
    return _finite(result.reward, "reward"), metrics


def _metric_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the agent's metric {name!r} is named by a {type(name).__name__}; a str was expected")
    name.encode()  # UnicodeEncodeError, a ValueError, where it could not travel
    return name


def _finite(value: Any, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the agent's {what} is {number}; a finite number was expected")
    return number
