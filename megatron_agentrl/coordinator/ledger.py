"""The ledger: where every prompt of the stream stands, durably.

The part of it that is under way lives in memory and in SQLite; a transition changes memory and marks rows, `commit`
writes all marked rows in one transaction. Nothing may be told to another process before the commit that holds it:
then a kill at any moment loses only what nobody was told. The ledger decides no policy (how many retries, which
groups make a batch); it refuses transitions that cannot be and proves that its sums balance.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_agentrl.coordinator.rows import (
    STALE,
    Balance,
    Failure,
    Group,
    GroupState,
    LedgerError,
    Sample,
    task_name,
)
from megatron_agentrl.coordinator.store import SNAPSHOT_NAME, Store, check, peek
from megatron_agentrl.coordinator.versions import Versions, VersionState
from megatron_agentrl.data.stream import Stream
from megatron_agentrl.trajectory.types import Receipt

_NEXT: dict[GroupState, tuple[GroupState, ...]] = {
    "in_flight": ("complete", "dropped", "failed"),
    "complete": ("planned", "dropped"),
    "planned": ("trained",),
}


class Ledger:
    """State of one run in `path`, over `stream`; `identity` names the prompts, so that no other ones are mixed in.

    On opening, samples that a worker had are queued again: the workers of an earlier process are gone, and should
    one still deliver, its receipt is taken.
    """

    def __init__(
        self, path: str | Path, stream: Stream, identity: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream
        self.identity = identity
        self.clock = clock
        self.store = Store(path, identity)
        self._load()

    def _load(self) -> None:
        store = self.store
        self.live: dict[str, Group] = {group.task_id: group for group in store.live_groups()}
        states = Counter[str](store.group_counts())
        self.trained, self.dropped, self.failed = states["trained"], states["dropped"], states["failed"]
        self.admitted: int = store.meta("admitted")
        self.cursor: int = store.meta("cursor")
        self.returned: deque[tuple[int, int]] = deque(store.returned())
        self.plans, self.trained_steps = store.plan_counts()
        self.pruned: int = store.pruned_steps()
        """Steps before this one have no stored plan any more."""
        self.versions = Versions(store.version_reports())
        self.counters = Counter[str](store.counts())
        self._evals = {eval_id: (tag, version, state, result) for eval_id, tag, version, state, result in store.evals()}
        self._groups: dict[str, Group] = {}
        self._samples: dict[tuple[str, int], tuple[str, Sample]] = {}
        self._writes: list[Callable[[], None]] = []
        self._bodies: dict[int, bytes] = {}
        self._counted = False
        self._states = Counter[str](group.state for group in self.live.values() if group.kind == "train")
        for group in self.live.values():
            for sample in group.samples:
                if sample.state == "asked":
                    self.give_back(group, sample)
                elif sample.state == "held":
                    sample.since = self.clock()

    def close(self) -> None:
        """Commits and releases the file."""
        self.commit()
        self.store.close()

    # ---- the stream --------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Training groups handed out and not finished."""
        return self._states["in_flight"]

    @property
    def buffered(self) -> int:
        """Training groups that are complete or planned."""
        return self._states["complete"] + self._states["planned"]

    @property
    def drained(self) -> bool:
        """Whether the stream has nothing more to admit."""
        return not self.returned and self.stream.total is not None and self.cursor >= self.stream.total

    def complete_groups(self) -> list[Group]:
        """Groups that wait to be planned."""
        return [group for group in self.live.values() if group.state == "complete" and group.kind == "train"]

    def admit(self, samples: int) -> Group | None:
        """The next prompt as a new group of `samples` queued samples: one that came back as stale first, else the
        next of the stream; None when it is drained."""
        if self.drained:
            return None
        if self.returned:
            position, round = self.returned.popleft()
        else:
            position, round = self.cursor, 0
            self.cursor += 1
        group = Group(
            task_name(position, round),
            "train",
            order=self.admitted,
            prompt=self.stream.at(position).prompt,
            samples=[Sample(index) for index in range(samples)],
            position=position,
            round=round,
        )
        self.admitted += 1
        self._enter(group)
        return group

    # ---- samples -----------------------------------------------------------------------------------------------

    def ask(self, group: Group, sample: Sample, worker: str) -> None:
        """Hands a queued sample to `worker`."""
        self._expect(group, sample, "queued")
        sample.state, sample.worker, sample.since = "asked", worker, self.clock()
        sample.asked += 1
        self._mark(group, sample)

    def accept(self, group: Group, sample: Sample, receipt: Receipt) -> None:
        """Takes a receipt as the sample's outcome."""
        self._expect(group, sample, "queued", "asked", "held")
        sample.state, sample.receipt = "done", receipt
        self._mark(group, sample)

    def hold(self, group: Group, sample: Sample, receipt: Receipt) -> None:
        """Keeps a receipt until the versions in it are proven."""
        self._expect(group, sample, "queued", "asked")
        sample.state, sample.receipt, sample.since = "held", receipt, self.clock()
        self._mark(group, sample)

    def give_back(self, group: Group, sample: Sample) -> None:
        """Queues a sample again, without a failure on its account."""
        self._expect(group, sample, "asked", "held")
        sample.state, sample.receipt = "queued", None
        self._mark(group, sample)

    def fail(self, group: Group, sample: Sample, failure: Failure, last: bool) -> None:
        """Notes a failed attempt; the sample is queued again unless it was the `last` one allowed."""
        self._expect(group, sample, "asked", "held")
        sample.failures.append(failure)
        sample.state, sample.receipt = "failed" if last else "queued", None
        self._mark(group, sample)

    # ---- groups ------------------------------------------------------------------------------------------------

    def finish(self, group: Group, state: GroupState, reason: str = "") -> None:
        """Moves a group on: complete, dropped (for a reason) or failed."""
        self._move(group, state)
        group.reason = reason
        if group.kind == "eval" or state == "complete":
            return
        if state == "dropped":
            self.dropped += 1
            self.count(f"dropped_{reason}")
            if reason == STALE and group.position is not None:
                self.returned.append((group.position, group.round + 1))
        else:
            self.failed += 1
        del self.live[group.task_id]

    def store_plan(self, step: int, body: bytes, task_ids: Sequence[str]) -> None:
        """Makes `body` the plan of `step`, the next one without a plan, over complete groups."""
        if step != self.plans:
            raise LedgerError(f"step {step} was planned, the next step without a plan is {self.plans}")
        for task_id in task_ids:
            group = self.live[task_id]
            self._move(group, "planned")
            group.step = step
        self.plans += 1
        self._bodies[step] = body
        self._writes.append(lambda: self.store.put_plan(step, body))

    def plan(self, step: int) -> bytes | None:
        """The plan of `step` as it was stored; None where there is none yet, or none any more (see `prune`)."""
        if not self.pruned <= step < self.plans:
            return None
        if step not in self._bodies:
            body = self.store.plan(step)
            if body is None:
                raise LedgerError(f"the plan of step {step} is missing from {self.store.path}")
            self._bodies[step] = body
        return self._bodies[step]

    def train(self, step: int, metrics: dict[str, Any]) -> bool:
        """Marks the plan of `step` trained; False when it already was."""
        if 0 <= step < self.trained_steps:
            return False
        if step != self.trained_steps or step >= self.plans:
            raise LedgerError(
                f"step {step} was reported trained; {self.trained_steps} is the next to be trained and plans exist "
                f"below {self.plans}"
            )
        for group in [group for group in self.live.values() if group.step == step]:
            self._move(group, "trained")
            self.trained += 1
            del self.live[group.task_id]
        self.trained_steps += 1
        self._bodies.pop(step, None)
        body = msgspec.json.encode(metrics)
        self._writes.append(lambda: self.store.put_trained(step, body))
        return True

    # ---- versions, evals, counters -----------------------------------------------------------------------------

    def report_version(
        self,
        engine: str,
        version: int,
        state: VersionState,
        gap: float | None = None,
        seconds: float | None = None,
    ) -> None:
        self.versions.report(engine, version, state)
        self._writes.append(lambda: self.store.put_version(engine, version, state, gap, seconds))

    def find_eval(self, tag: str, version: int) -> str | None:
        """The eval of that tag and version, open or done."""
        for eval_id, (found_tag, found_version, _, _) in self._evals.items():
            if (found_tag, found_version) == (tag, version):
                return eval_id
        return None

    def open_eval(self, tag: str, version: int, prompts: Iterable[int]) -> tuple[str, list[Group]]:
        """A new eval: one queued single-sample group for each held-out prompt (by index). Not in the balance."""
        self._counted = True
        self.counters["evals"] += 1
        eval_id = f"e{self.counters['evals']:04d}"
        self._evals[eval_id] = (tag, version, "open", None)
        self._writes.append(lambda: self.store.put_eval(eval_id, tag, version, "open", None))
        groups = [
            Group(f"{eval_id}-{prompt:06d}", "eval", order=index, prompt=prompt, samples=[Sample(0)], eval_id=eval_id)
            for index, prompt in enumerate(prompts)
        ]
        for group in groups:
            self._enter(group)
        return eval_id, groups

    def eval_groups(self, eval_id: str) -> list[Group]:
        """Groups of an open eval; of a done one none are left in memory."""
        return [group for group in self.live.values() if group.eval_id == eval_id]

    def eval_result(self, eval_id: str) -> dict[str, Any] | None:
        """The stored result of a done eval, None while it is open. KeyError when there is no such eval."""
        result = self._evals[eval_id][3]
        return None if result is None else msgspec.json.decode(result)

    def has_eval(self, eval_id: str) -> bool:
        return eval_id in self._evals

    def open_evals(self) -> list[str]:
        return [eval_id for eval_id, (_, _, state, _) in self._evals.items() if state == "open"]

    def close_eval(self, eval_id: str, result: dict[str, Any]) -> None:
        """Stores the result and lets go of the groups."""
        tag, version, _, _ = self._evals[eval_id]
        body = msgspec.json.encode(result)
        self._evals[eval_id] = (tag, version, "done", body)
        self._writes.append(lambda: self.store.put_eval(eval_id, tag, version, "done", body))
        for group in self.eval_groups(eval_id):
            del self.live[group.task_id]

    def count(self, name: str, by: int = 1) -> None:
        """Adds to a named counter that survives restarts."""
        self.counters[name] += by
        self._counted = True

    def note(self, event: str, **fields: Any) -> None:
        """Records an event for people who read the ledger."""
        self._writes.append(lambda: self.store.put_event(event, fields))

    # ---- durability --------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether there are transitions that are not durable yet."""
        return bool(self._groups or self._samples or self._writes or self._counted)

    def commit(self) -> None:
        """Makes every transition so far durable; free when there was none."""
        if not self.dirty:
            return
        store = self.store
        store.begin()
        store.put_groups(self._groups.values())
        store.put_samples(self._samples.values())
        for write in self._writes:
            write()
        if self._counted:
            store.put_counts(dict(self.counters))
        store.put_meta(admitted=self.admitted, cursor=self.cursor)
        store.end()
        self._groups.clear()
        self._samples.clear()
        self._writes.clear()
        self._counted = False

    def counts(self) -> Balance:
        """The balance from memory, unproven and cheap."""
        total = self.stream.total
        return Balance(
            admitted=self.admitted,
            trained=self.trained,
            dropped=self.dropped,
            failed=self.failed,
            buffered=self.buffered,
            running=self.running,
            returned=len(self.returned),
            untouched=None if total is None else total - self.cursor,
        )

    def balance(self) -> Balance:
        """Commits and proves from the stored rows that the sums balance and that consumed, buffered, in flight and
        untouched partition the stream. LedgerError with the numbers when they do not."""
        self.commit()
        states = Counter[str](self.store.group_counts())
        counts = self.counts()
        stored = counts._replace(
            trained=states["trained"],
            dropped=states["dropped"],
            failed=states["failed"],
            buffered=states["complete"] + states["planned"],
            running=states["in_flight"],
            returned=len(self.store.returned()),
        )
        if stored != counts or sum(stored[1:6]) != counts.admitted:
            raise LedgerError(f"the ledger does not balance: stored rows say {stored}, the account says {counts}")
        different, double = self.store.positions()
        if different != self.cursor or double:
            raise LedgerError(
                f"the stream is not partitioned: {different} of {self.cursor} admitted positions have a group, "
                f"{double} have two that count or lie past the cursor"
            )
        return stored

    def prune(self, step: int) -> None:
        """Before a checkpoint at the start of `step`: lets go of plans and receipts that only a resume from before
        the previous checkpoint would need. Such a resume takes the snapshot of its own checkpoint instead."""
        self.commit()
        previous = self.store.checkpoint_before(step)
        if previous is not None and previous > self.pruned:
            self.store.prune(previous)
            self.pruned = self.store.pruned_steps()

    def snapshot(self, folder: str | Path) -> Path:
        """Writes a proven copy of the ledger into a checkpoint's folder."""
        self.balance()
        return self.store.snapshot(Path(folder))

    def resume(self, step: int, folder: str | Path | None) -> None:
        """Brings the ledger to the start of `step`, from this file or from a checkpoint's snapshot.

        This file wins where it is of the same run, at least as new (it knows the snapshot's future) and not pruned
        beyond `step`. Plans from
        `step` on stay as they are and are handed out again. What was in flight is queued again under its task id.
        Samples whose payload is no longer in the spool are asked again, and plans that need them are made anew.
        Calling it twice changes nothing more.
        """
        self.commit()
        snapshot = None if folder is None else Path(folder) / SNAPSHOT_NAME
        if snapshot is not None and snapshot.is_file() and not self._knows(snapshot, step):
            self.store.restore(snapshot)
        elif step < self.pruned:
            raise LedgerError(
                f"resume at step {step}: {self.store.path} has let go of the plans before step {self.pruned} and there "
                f"is no {snapshot or 'snapshot'}; resume from a checkpoint that holds {SNAPSHOT_NAME}, or start a run "
                f"under a new run_name"
            )
        elif step and not self.admitted:
            raise LedgerError(
                f"resume at step {step}: {self.store.path} is empty and there is no {snapshot or 'snapshot'}; resume "
                f"from a checkpoint that holds {SNAPSHOT_NAME}"
            )
        planned, _ = self.store.plan_counts()
        if planned < step:
            raise LedgerError(
                f"resume at step {step}: the ledger knows plans up to step {planned - 1}; it is older than the "
                f"checkpoint, resume from one at step {planned} or before"
            )
        self.store.rewind(step)
        self._load()
        self._ask_lost_again()
        self.balance()

    def _knows(self, snapshot: Path, step: int) -> bool:
        """Whether this file holds all that a resume at `step` needs of `snapshot`."""
        theirs = peek(snapshot)
        check(snapshot, theirs, self.identity)
        if theirs["ledger"] == self.store.meta("ledger"):
            return self.store.meta("commits") >= theirs["commits"] and self.pruned <= step
        if self.admitted:
            raise LedgerError(
                f"{snapshot} is of another run than {self.store.path}, which holds {self.admitted} groups of its own; "
                f"resume in the run folder of that checkpoint, or in a new one"
            )
        return False

    def _ask_lost_again(self) -> None:
        sizes: dict[str, int] = {}
        lost: list[tuple[Group, Sample]] = []
        for group in self.live.values():
            for sample in group.samples:
                where = sample.receipt.where if sample.receipt is not None else None
                if where is None or group.kind == "eval":
                    continue
                if where.file not in sizes:
                    file = self.store.path.parent / where.file
                    sizes[where.file] = file.stat().st_size if file.is_file() else 0
                if sizes[where.file] < where.offset + where.length:
                    lost.append((group, sample))
        if not lost:
            return
        unplannable = min((group.step for group, _ in lost if group.step is not None), default=None)
        if unplannable is not None:
            first = unplannable
            self._writes.append(lambda: self.store.forget_plans(first))
            self.plans = unplannable
        for group in self.live.values():
            if unplannable is not None and group.step is not None and group.step >= unplannable:
                self._restate(group, "complete")
                group.step = None
        for group, sample in lost:
            self._restate(group, "in_flight")
            sample.state, sample.receipt = "queued", None
            self._mark(group, sample)
        self.count("payloads_lost", len(lost))
        self.commit()

    # ---- marks -------------------------------------------------------------------------------------------------

    def _enter(self, group: Group) -> None:
        self.live[group.task_id] = group
        if group.kind == "train":
            self._states[group.state] += 1
        self._groups[group.task_id] = group
        for sample in group.samples:
            self._mark(group, sample)

    def _mark(self, group: Group, sample: Sample) -> None:
        self._samples[group.task_id, sample.index] = (group.task_id, sample)

    def _move(self, group: Group, state: GroupState) -> None:
        if state not in _NEXT.get(group.state, ()):
            raise LedgerError(f"{group.task_id} is {group.state} and cannot become {state}")
        self._restate(group, state)

    def _restate(self, group: Group, state: GroupState) -> None:
        if group.kind == "train":
            self._states[group.state] -= 1
            self._states[state] += 1
        group.state = state
        self._groups[group.task_id] = group

    def _expect(self, group: Group, sample: Sample, *states: str) -> None:
        if group.state != "in_flight" or sample.state not in states:
            raise LedgerError(
                f"{group.task_id}/{sample.index} is {sample.state} in a group that is {group.state}; expected "
                f"{' or '.join(states)} in one in flight"
            )
