"""The coordinator's rules, without HTTP: who gets work, what becomes of a receipt, what a step trains on.

Every method runs to its end without waiting; the caller commits the ledger before it tells anyone the outcome.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_agentrl.coordinator import late
from megatron_agentrl.coordinator.admission import free_slots
from megatron_agentrl.coordinator.batch_plan import Candidate, Shape, plan_batch, select
from megatron_agentrl.coordinator.evals import summarize
from megatron_agentrl.coordinator.ledger import Ledger
from megatron_agentrl.coordinator.rows import STALE, TOO_FEW, Failure, Group, Kind, Sample
from megatron_agentrl.coordinator.versions import VersionState, engine_names
from megatron_agentrl.data.packing import multiples_of
from megatron_agentrl.data.prompts import Prompt, PromptSets
from megatron_agentrl.recipe.schema import Order, Recipe
from megatron_agentrl.trajectory.types import STATUSES, Receipt

#: Statuses of a receipt that may carry a reward.
SCORED = ("ok", "over_length")
#: Seconds beyond `agent.timeout` after which a worker that has sent no receipt loses its sample.
GRACE = 15.0


class ProtocolError(ValueError):
    """A request that cannot be right. `status` is the HTTP status to answer with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Task(msgspec.Struct):
    """One prompt as a worker gets it."""

    task_id: str
    messages: list[dict[str, Any]]
    answer: str | None
    metadata: dict[str, Any]


class Assignment(msgspec.Struct):
    """Samples of one group for a worker to run."""

    task_id: str
    kind: Kind
    samples: list[int]
    temperature: float
    task: Task


class BatchReply(msgspec.Struct, omit_defaults=True):
    """Answer to `GET /batch`: ready (with a plan), waiting (with who is late), exhausted or failed (with a message)."""

    status: str
    plan: msgspec.Raw | None = None
    late: str = ""
    message: str = ""


class Coordinator:
    """One run. `clock` is monotonic seconds; `grace` is added to `agent.timeout` for a sample's lease; `record` takes
    (name, fields) of what happens, for the event log."""

    def __init__(
        self,
        recipe: Recipe,
        ledger: Ledger,
        prompts: PromptSets,
        clock: Callable[[], float] = time.monotonic,
        grace: float = GRACE,
        record: Callable[..., None] = lambda name, **fields: None,
    ) -> None:
        topology = recipe.topology
        self.recipe = recipe
        self.ledger = ledger
        self.prompts = prompts
        self.clock = clock
        self.record = record
        self.lease = recipe.agent.timeout + grace
        self.failure_limit = max(8, recipe.train.batch)
        self.shape = Shape(
            ranks=topology.world // (topology.tp * topology.pp * topology.cp),
            micro_batch_tokens=recipe.train.micro_batch_tokens,
            multiple=topology.pp if topology.vpp > 1 else 1,
            packing=multiples_of(topology) if recipe.train.packing else None,
        )
        algorithm = recipe.algorithm
        coefs = (algorithm.kl_coef, algorithm.teacher_coef, algorithm.entropy_coef)
        self.keep_equal = max(coefs) > 0 or algorithm.shuffle_rewards
        self.progress: dict[str, Any] = {}
        self.stopping = False
        self._reset()

    def _reset(self) -> None:
        """What follows from the ledger, or dies with the processes of one start."""
        self.seen: dict[str, float] = {}
        self.failure = ""
        self._streak: list[str] = []
        self._settled = 0
        self._looked: tuple[int, int] | None = None
        self._queues: dict[Kind, deque[tuple[Group, Sample]]] = {"eval": deque(), "train": deque()}
        self._open: dict[str, int] = dict.fromkeys(self.ledger.open_evals(), 0)
        for group in sorted(self.ledger.live.values(), key=lambda group: group.order):
            if group.state != "in_flight":
                continue
            if group.eval_id is not None:
                self._open[group.eval_id] += 1
            self._queues[group.kind].extend((group, sample) for sample in group.samples if sample.state == "queued")
            self._settle(group)

    # ---- work --------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Groups that may be admitted now."""
        batch, ledger = self.recipe.train.batch, self.ledger
        return free_slots(
            ledger.versions.oldest_serving(),
            self.recipe.staleness.eta,
            batch,
            accepted=ledger.trained + ledger.buffered,
            running=ledger.running,
            total=self.recipe.train.steps * batch,
        )

    def work(self, worker: str, room: int) -> list[Assignment]:
        """At most `room` trajectories for `worker`: evals first, then what was asked before, then new prompts."""
        self.seen[worker] = self.clock()
        out: list[Assignment] = []
        if self.stopping:
            return out
        room = self._hand_out("eval", worker, room, out)
        if self.failure:
            return out  # the trainer learns of it at its next batch; until then it may wait for an evaluation
        room = self._hand_out("train", worker, room, out)
        slots = self.slots
        while room > 0 and slots > 0 and (group := self.ledger.admit(self.recipe.algorithm.group_size)):
            slots -= 1
            self._queues["train"].extend((group, sample) for sample in group.samples)
            room = self._hand_out("train", worker, room, out)
        return out

    def _hand_out(self, kind: Kind, worker: str, room: int, out: list[Assignment]) -> int:
        queue = self._queues[kind]
        while room > 0 and queue:
            group, sample = queue.popleft()
            if sample.state != "queued" or group.state != "in_flight":
                continue  # a late receipt settled it while it waited
            self.ledger.ask(group, sample, worker)
            if not out or out[-1].task_id != group.task_id:
                out.append(self._assignment(group))
            out[-1].samples.append(sample.index)
            room -= 1
        return room

    def _assignment(self, group: Group) -> Assignment:
        train = group.kind == "train"
        prompt: Prompt = (self.prompts.train if train else self.prompts.held_out)[group.prompt]
        temperature = self.recipe.sampling.temperature if train else self.recipe.eval.temperature
        task = Task(group.task_id, prompt.messages, prompt.answer, prompt.metadata)
        return Assignment(group.task_id, group.kind, [], temperature, task)

    # ---- receipts ----------------------------------------------------------------------------------------------

    def receipts(self, receipts: Sequence[Receipt]) -> int:
        """Takes receipts; returns how many of them settled, held or failed an open sample.

        A repeated receipt, and one that comes after its sample or group has its outcome, changes nothing.
        """
        for receipt in receipts:
            self._check(receipt)
        return sum(self._receive(receipt) for receipt in receipts)

    def _check(self, receipt: Receipt) -> None:
        if receipt.status not in STATUSES:
            raise ProtocolError(f"{receipt.task_id}: status {receipt.status!r}; expected one of {', '.join(STATUSES)}")
        group = self.ledger.live.get(receipt.task_id)
        if group is None:
            return
        if not 0 <= receipt.sample < len(group.samples):
            raise ProtocolError(f"{receipt.task_id}: sample {receipt.sample} of a group of {len(group.samples)}")
        if group.kind == "train" and receipt.status in SCORED and receipt.where is None:
            raise ProtocolError(
                f"{receipt.task_id}/{receipt.sample}: status {receipt.status} without a payload (where)"
            )

    def _receive(self, receipt: Receipt) -> bool:
        group = self.ledger.live.get(receipt.task_id)
        if group is None or group.state != "in_flight":
            self.ledger.count("receipts_late")
            return False
        sample = group.samples[receipt.sample]
        if sample.final or sample.state == "held":
            self.ledger.count("receipts_repeated")
            return False
        flaw = _flaw(receipt, group.kind)
        if not flaw:
            self._judge(group, sample, receipt)
            return True
        known = any(failure.rollout_id == receipt.rollout_id for failure in sample.failures)
        if sample.state != "asked" or known:
            self.ledger.count("receipts_repeated")
            return False
        self._fail(group, sample, Failure(receipt.rollout_id, receipt.status, flaw))
        return True

    def _judge(self, group: Group, sample: Sample, receipt: Receipt) -> None:
        verdict = self.ledger.versions.judge(receipt.engine, receipt.sampled)
        if verdict == "proven":
            self.ledger.accept(group, sample, receipt)
            self._settle(group)
        elif verdict == "held":
            if sample.state != "held":
                self.ledger.hold(group, sample, receipt)
                self.ledger.count("samples_held")
        else:
            self.ledger.count("samples_void")
            if sample.state != "queued":
                self.ledger.give_back(group, sample)
                self._queues[group.kind].appendleft((group, sample))

    def _fail(self, group: Group, sample: Sample, failure: Failure) -> None:
        self.ledger.count(f"failed_{failure.status}")
        self.record("sample_failed", task_id=group.task_id, sample=sample.index, **failure._asdict())
        last = len(sample.failures) >= self.recipe.agent.retries
        self.ledger.fail(group, sample, failure, last)
        if not last:
            self._queues[group.kind].appendleft((group, sample))
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """Gives a group its outcome when each of its samples has one."""
        if not group.final:
            return
        survivors = len(group.receipts)
        if group.eval_id is not None:
            self.ledger.finish(group, "complete" if survivors else "failed")
            self._open[group.eval_id] -= 1
            self._close_if_done(group.eval_id)
            return
        self._settled += 1  # a group that is lost, too, may let those behind it into a batch
        if survivors >= min(2, len(group.samples)):
            self.ledger.finish(group, "complete")
            self._streak.clear()
            return
        if survivors:
            self.ledger.finish(group, "dropped", TOO_FEW)
        else:
            self.ledger.finish(group, "failed", "every sample failed")
        self.record("group_lost", task_id=group.task_id, state=group.state, survivors=survivors)
        last = next(sample for sample in group.samples if sample.state == "failed").failures[-1]
        self._streak.append(f"{group.task_id}: {last.status}: {last.message}")
        if len(self._streak) >= self.failure_limit:
            self.failure = f"the last {len(self._streak)} groups all failed, at the end {self._streak[-1]}"

    def expire(self) -> bool:
        """Fails samples whose worker, or whose engine's proof, has taken longer than the lease; True if any did."""
        oldest = self.clock() - self.lease
        expired = [
            (group, sample)
            for group in self.ledger.live.values()
            if group.state == "in_flight"
            for sample in group.samples
            if sample.state in ("asked", "held") and sample.since <= oldest
        ]
        for group, sample in expired:
            if sample.state == "asked":
                message = f"{sample.worker} sent no receipt within {self.lease:.1f} s"
            else:
                engine = sample.receipt.engine if sample.receipt else "its engine"
                message = f"{engine} did not prove the sampled version within {self.lease:.1f} s"
            self._fail(group, sample, Failure(f"lease-{sample.asked}", "timeout", message))
        return bool(expired)

    # ---- batches -----------------------------------------------------------------------------------------------

    def batch(self, step: int) -> BatchReply:
        """What step `step` trains on, the same at every call once it is ready."""
        if (body := self.ledger.plan(step)) is not None:
            return BatchReply("ready", plan=msgspec.Raw(body))
        if 0 <= step < self.ledger.pruned:
            raise ProtocolError(f"the plan of step {step} is behind the newest checkpoints and not kept any more", 409)
        if step != self.ledger.plans:
            raise ProtocolError(f"step {step} has no plan and the next one to be planned is {self.ledger.plans}", 409)
        size = self.recipe.train.batch
        if self._looked != (step, self._settled):
            self._looked = (step, self._settled)
            if self._plan(step, size):
                return self.batch(step)
        if self.failure:
            return BatchReply("failed", message=self.failure)
        ready = len(self._ready())
        if self.ledger.drained and not self.ledger.running:
            if ready and self.recipe.data.train_remainder and self._plan(step, ready):
                return self.batch(step)
            if self._streak and not self.ledger.trained + self.ledger.buffered:
                return BatchReply("failed", message=f"no group of the stream survived, at the end {self._streak[-1]}")
            return BatchReply(
                "exhausted", message=f"the stream's {self.ledger.cursor} prompts are used up, {ready} groups are left"
            )
        what = f"waiting for {size - ready} of {size} groups"
        return BatchReply("waiting", late=self._late(what, "train"))

    def _plan(self, step: int, size: int) -> bool:
        eta = self.recipe.staleness.eta
        candidates = [Candidate(group.order, group.task_id, group.receipts) for group in self._ready()]
        selection = select(candidates, step, eta, size)
        for task_id in selection.stale:
            self.ledger.finish(self.ledger.live[task_id], "dropped", STALE)
            self.record("group_stale", task_id=task_id, step=step)
        if len(selection.chosen) < size:
            return False
        plan = plan_batch(selection.chosen, step, eta, self.shape, self.keep_equal)
        self.ledger.store_plan(step, msgspec.json.encode(plan), [chosen.task_id for chosen in selection.chosen])
        self.record("plan", step=step, tokens=plan.tokens, padding=plan.padding, skipped=plan.skipped, **plan.stats)
        return True

    def _ready(self) -> list[Group]:
        """Complete groups that the next batch may take: with `order=admission` only those before every open one."""
        complete = self.ledger.complete_groups()
        if self.recipe.staleness.order is Order.completion:
            return complete
        open_orders = [g.order for g in self.ledger.live.values() if g.kind == "train" and g.state == "in_flight"]
        first_open = min(open_orders, default=None)
        return [group for group in complete if first_open is None or group.order < first_open]

    def trained(self, step: int, metrics: dict[str, Any]) -> None:
        """Marks the plan of `step` trained."""
        self.ledger.train(step, metrics)

    def _late(self, what: str, kind: Kind) -> str:
        groups = (group for group in self.ledger.live.values() if group.kind == kind)
        return late.describe(what, groups, self.ledger.versions, self.seen, self.clock())

    # ---- versions ----------------------------------------------------------------------------------------------

    def version(
        self,
        engine: str,
        version: int,
        state: VersionState,
        gap: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """Takes a report and settles the receipts that were held for it."""
        self.ledger.report_version(engine, version, state, gap, seconds)
        self.record("version", engine=engine, version=version, state=state, gap=gap, seconds=seconds)
        held = [
            (group, sample, sample.receipt)
            for group in self.ledger.live.values()
            for sample in group.samples
            if sample.state == "held" and sample.receipt is not None and engine in engine_names(sample.receipt.engine)
        ]
        for group, sample, receipt in held:
            self._judge(group, sample, receipt)

    # ---- evals -------------------------------------------------------------------------------------------------

    def start_eval(self, tag: str, version: int) -> str:
        """Starts (or finds) the evaluation of `version`; its id."""
        if (known := self.ledger.find_eval(tag, version)) is not None:
            return known
        if not self.prompts.held_out:
            raise ProtocolError("there are no held-out prompts to evaluate on; set data.eval (or data.eval_size)", 409)
        size = len(self.prompts.held_out)
        if self.recipe.eval.size is not None:
            size = min(size, self.recipe.eval.size)
        eval_id, groups = self.ledger.open_eval(tag, version, range(size))
        self._open[eval_id] = len(groups)
        self._queues["eval"].extend((group, group.samples[0]) for group in groups)
        return eval_id

    def eval_status(self, eval_id: str) -> dict[str, Any]:
        """The result so far; with `late` until it is done."""
        if not self.ledger.has_eval(eval_id):
            raise ProtocolError(f"there is no eval {eval_id}; POST /evals starts one", 404)
        if (result := self.ledger.eval_result(eval_id)) is not None:
            return result
        groups = self.ledger.eval_groups(eval_id)
        open_groups = sum(group.state == "in_flight" for group in groups)
        what = f"waiting for {open_groups} of {len(groups)} evaluations"
        return {**summarize(groups), "late": self._late(what, "eval")}

    def _close_if_done(self, eval_id: str) -> None:
        if not self._open[eval_id]:
            del self._open[eval_id]
            self.ledger.close_eval(eval_id, summarize(self.ledger.eval_groups(eval_id)))

    # ---- checkpoints and the live view -------------------------------------------------------------------------

    def checkpoint(self, step: int, folder: Path) -> None:
        """Writes the ledger's snapshot into the folder of a checkpoint made at the start of `step`."""
        if not folder.is_dir():
            raise ProtocolError(f"{folder} is not a folder; make the checkpoint's folder first", 409)
        self.ledger.prune(step)
        self.ledger.note("checkpoint", step=step, folder=str(folder))
        self.ledger.snapshot(folder)

    def resume(self, step: int, folder: Path | None) -> None:
        """Goes back to the start of `step`; see `Ledger.resume`."""
        self.ledger.resume(step, folder)
        self.ledger.note("resume", step=step, folder=str(folder))
        self._reset()

    def report_progress(self, progress: Mapping[str, Any]) -> None:
        """What the trainer says it does; a phase of `done` or `failed` tells workers to stop."""
        self.progress.update(progress)
        self.stopping = self.progress.get("phase") in ("done", "failed")

    def status(self) -> dict[str, Any]:
        """Everything the live view shows."""
        now, ledger = self.clock(), self.ledger
        states = {"queued": 0, "asked": 0, "held": 0}
        held_by: dict[str, int] = {}
        for sample in self._open_samples():
            states[sample.state] += 1
            if sample.state == "asked":
                held_by[sample.worker] = held_by.get(sample.worker, 0) + 1
        return {
            "progress": self.progress,
            "groups": ledger.counts()._asdict(),
            "samples": states,
            "slots": self.slots,
            "plans": ledger.plans,
            "trained_steps": ledger.trained_steps,
            "engines": ledger.versions.engines(),
            "workers": {name: {"idle": now - at, "samples": held_by.get(name, 0)} for name, at in self.seen.items()},
            "evals": {eval_id: self.eval_status(eval_id) for eval_id in ledger.open_evals()},
            "counters": dict(ledger.counters),
            "failure": self.failure,
        }

    def _open_samples(self) -> Iterable[Sample]:
        for group in self.ledger.live.values():
            if group.state == "in_flight":
                yield from (sample for sample in group.samples if not sample.final)


def _flaw(receipt: Receipt, kind: Kind) -> str:
    """Why a receipt cannot count as an outcome; empty when it can.

    A training trajectory without a sampled token has nothing to learn from at any age: it is a failure, not stale,
    or its prompt would be asked for ever.
    """
    if receipt.status not in SCORED:
        return receipt.message or "no message"
    if receipt.reward is None:
        return receipt.message or "no reward was given"
    if kind == "train" and not any(receipt.sampled.values()):
        return receipt.message or "the policy sampled no token"
    return ""
