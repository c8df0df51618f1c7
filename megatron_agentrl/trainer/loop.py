"""The trainer's phases: warm start, reinforcement, export. Every rank runs the same code.

Rank 0 alone talks to the coordinator and the engines; what it learns reaches the other ranks by broadcast,
so that all ranks enter the same collectives in the same order. The loop owns no numerics: batches are
`trainer.batch`, the step is `trainer.step`, the estimators are `algorithm`.

Version v is the weights after v reinforcement steps; step v starts from version v and makes v + 1.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from megatron_agentrl.algorithm.advantages import group_advantages
from megatron_agentrl.data.encoded import EncodedDemonstrations
from megatron_agentrl.data.packing import first_fit, multiples_of
from megatron_agentrl.layout.megatron import fp32_tensors, hf_tensors
from megatron_agentrl.observe.events import EventLog
from megatron_agentrl.observe.metrics import MetricsWriter
from megatron_agentrl.recipe.schema import Dtype, Recipe
from megatron_agentrl.trainer import canary, checkpoint
from megatron_agentrl.trainer.batch import MicroBatch, rl_micro_batch, sft_micro_batch
from megatron_agentrl.trainer.checkpoint_saver import Saver
from megatron_agentrl.trainer.coordinator_client import CoordinatorClient
from megatron_agentrl.trainer.data_parallel import settle
from megatron_agentrl.trainer.frozen import Frozen, frozen_policies
from megatron_agentrl.trainer.losses import rl_loss, sft_loss
from megatron_agentrl.trainer.micro_batches import empty
from megatron_agentrl.trainer.optimizer import build, learning_rate
from megatron_agentrl.trainer.precision import TORCH_DTYPE
from megatron_agentrl.trainer.step import StepResult, train_step
from megatron_agentrl.trainer.topology import Rank
from megatron_agentrl.trainer.weights_io import iterate_hf, save_hf
from megatron_agentrl.trajectory.spool import SpoolReader
from megatron_agentrl.trajectory.types import Receipt, Trajectory
from megatron_agentrl.weights.manifest import Manifest, TensorInfo
from megatron_agentrl.weights.publish import Canary, Publisher

T = TypeVar("T")


@dataclass
class Trainer:
    """What every phase needs. `models` are the wrapped chunks. The last three are None on ranks other than 0."""

    recipe: Recipe
    run_dir: Path
    rank: Rank
    hf_config: dict[str, Any]
    models: list[Any]
    pad_id: int
    events: EventLog
    metrics: MetricsWriter | None = None
    coordinator: CoordinatorClient | None = None
    publisher: Publisher | None = None

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"


def from_rank0(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank. An exception on rank 0 is raised there; the run ends with it."""
    box = [make() if dist.get_rank() == 0 else None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


# --- warm start -----------------------------------------------------------------------------------


def warm_start(t: Trainer, demonstrations: EncodedDemonstrations) -> None:
    """Supervised steps on demonstrations; the global batch is cut over data-parallel ranks."""
    ws = t.recipe.warm_start
    optimizer = build(t.models, ws.optimizer, t.recipe)
    # The next batch is rendered and encoded while a step computes: most of a backward pass runs without the GIL.
    with ThreadPoolExecutor(1, thread_name_prefix="demonstrations") as ahead:
        coming = ahead.submit(demonstrations.batch, 0, ws.batch)
        for step in range(1, ws.steps + 1):
            rows = coming.result()
            if step < ws.steps:
                coming = ahead.submit(demonstrations.batch, step, ws.batch)
            _warm_start_step(t, optimizer, rows, step)


def _warm_start_step(t: Trainer, optimizer: Any, rows: list[tuple[list[int], list[int]]], step: int) -> None:
    ws = t.recipe.warm_start
    t0 = time.perf_counter()
    lr = learning_rate(ws.optimizer, step, ws.steps)
    tokens = sum(sum(mask[1:]) for _, mask in rows)  # the first id has nothing before it to be predicted from
    micro_batches = list(_sft_micro_batches(t, rows[t.rank.dp :: t.rank.dp_size]))
    micro_batches += [empty()] * (_largest(t, len(micro_batches)) - len(micro_batches))
    result = train_step(t.models, optimizer, micro_batches, sft_loss, lr=lr, tokens=tokens, step=step)
    if t.metrics is not None:
        seconds = time.perf_counter() - t0
        t.metrics.log(
            "warm_start",
            step,
            {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": lr,
                "tokens": result.tokens,
                **_scaling(t.recipe, result),
                **{k: v / result.tokens for k, v in result.metrics.items() if k == "mtp_cross_entropy"},
                "seconds": seconds,
            },
        )
        if t.coordinator is not None and (step % 10 == 0 or step == ws.steps):
            t.coordinator.progress(phase="warm start", step=step, of=ws.steps, loss=result.loss)


def _sft_micro_batches(t: Trainer, rows: list[tuple[list[int], list[int]]]) -> Iterator[MicroBatch]:
    """Rows in micro-batches within the recipe's bound: packed, or in order of length so that little is padded."""
    if t.recipe.train.packing:
        lengths = [[len(ids)] for ids, _ in rows]
        for indices in first_fit(lengths, t.recipe.train.micro_batch_tokens, multiples_of(t.recipe.topology)):
            yield sft_micro_batch([rows[index] for index in indices], t.pad_id)
        return
    chunk: list[tuple[list[int], list[int]]] = []
    for row in sorted(rows, key=lambda r: len(r[0])):
        if chunk and (len(chunk) + 1) * len(row[0]) > t.recipe.train.micro_batch_tokens:
            yield sft_micro_batch(chunk, t.pad_id)
            chunk = []
        chunk.append(row)
    if chunk:
        yield sft_micro_batch(chunk, t.pad_id)


def _largest(t: Trainer, count: int) -> int:
    """The largest count over the ranks: all must run that many micro-batches."""
    if dist.get_world_size() == 1:
        return count
    largest = torch.tensor(count, device=t.rank.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


# --- reinforcement --------------------------------------------------------------------------------


def reinforce(t: Trainer, resume_at: int | None) -> int:
    """Reinforcement steps on from the checkpoint of version `resume_at` (None: from the present weights).

    Held-out evaluations stand before the first step, every `eval.every` steps and after the last.
    Returns the last version.
    """
    recipe = t.recipe
    optimizer = build(t.models, recipe.optimizer, recipe)
    saver = Saver(
        t.checkpoints,
        asynchronous=recipe.checkpoint.asynchronous,
        keep=recipe.checkpoint.keep,
        deadline=recipe.deadlines.checkpoint,
        on_complete=lambda folder: t.events.point("checkpoint complete", folder=folder.name),
    )
    frozen = frozen_policies(recipe, t.models, t.hf_config, t.rank, t.checkpoints, resume=resume_at is not None)
    version = resume_at or 0
    folder = t.checkpoints / f"step_{version}"
    if t.rank.is_first:
        # Also at a first start: it tells the coordinator that no engine holds a proven version yet.
        assert t.coordinator is not None
        t.coordinator.resume(version, None if resume_at is None else str(folder))
    if resume_at is None:
        save_checkpoint(t, saver, optimizer, 0)  # a stop before the next checkpoint does not lose the warm start
    else:
        checkpoint.load(folder, t.models, optimizer)
    publish_version(t, version)
    if version == 0:
        evaluate(t, "before", version)
    while version < recipe.train.steps:
        t0 = time.perf_counter()
        with t.events.span("wait", step=version):
            plan = from_rank0(lambda v=version: t.coordinator.batch(v, recipe.deadlines.batch))  # type: ignore[union-attr, misc]
        if plan is None:
            break
        t1 = time.perf_counter()
        with t.events.span("train", step=version):
            values = _rl_step(t, optimizer, plan, version, frozen)
        saver.poll()
        if t.rank.is_first:
            t.coordinator.step_done(version, values)  # type: ignore[union-attr]
        t2 = time.perf_counter()
        version += 1
        with t.events.span("publish", version=version):
            publish_version(t, version)
        t3 = time.perf_counter()
        if t.metrics is not None:
            values["seconds"] = {"wait": t1 - t0, "train": t2 - t1, "publish": t3 - t2}
            t.metrics.log("train", version, values)
        if recipe.checkpoint.every and version % recipe.checkpoint.every == 0 and version < recipe.train.steps:
            save_checkpoint(t, saver, optimizer, version)
        if recipe.eval.every and version % recipe.eval.every == 0 and version < recipe.train.steps:
            evaluate(t, "during", version)
    save_checkpoint(t, saver, optimizer, version)
    saver.wait()  # not lost to an evaluation that fails
    evaluate(t, "after", version)
    return version


def _rl_step(
    t: Trainer, optimizer: Any, plan: dict[str, Any], version: int, frozen: dict[str, Frozen]
) -> dict[str, Any]:
    recipe = t.recipe
    rewards = [list(map(float, g["rewards"])) for g in plan["groups"]]
    if recipe.algorithm.shuffle_rewards:
        rewards = _shuffled(rewards, recipe.seed, version)
    advantages = [group_advantages(recipe.algorithm.advantage, r) for r in rewards]
    micro_batches = []
    spool = SpoolReader(t.run_dir)
    for entries in plan["ranks"][t.rank.dp]:
        rows: list[tuple[Trajectory, float]] = []
        for entry in entries:
            receipt = msgspec.convert(entry["receipt"], Receipt, strict=False)
            assert receipt.where is not None, f"{receipt.rollout_id} was planned without a payload"
            rows.append((spool.read(receipt.where), advantages[entry["group"]][entry["member"]]))
        micro_batches.append(rl_micro_batch(rows, t.pad_id, version, recipe.staleness.eta))
    spool.close()
    temperature = recipe.sampling.temperature
    for column, policy in frozen.items():
        for batch, logprobs_BT in zip(micro_batches, policy.logprobs(micro_batches, temperature), strict=True):
            batch.columns[column] = logprobs_BT
    result = train_step(
        t.models,
        optimizer,
        micro_batches,
        rl_loss(recipe.algorithm),
        lr=learning_rate(recipe.optimizer, version + 1, recipe.train.steps),
        tokens=plan["tokens"],
        temperature=temperature,
        step=version,
        entropy=True,
    )
    flat = [r for g in plan["groups"] for r in g["rewards"]]
    return {
        "reward": sum(flat) / len(flat),
        "groups": len(plan["groups"]),
        "rows": len(flat) - plan["skipped"],
        "rows_without_signal": plan["skipped"],
        "padding": plan["padding"],
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        **_scaling(recipe, result),
        "tokens_trained": plan["tokens"],
        **plan["stats"],
        "staleness_max": int(plan["stats"]["staleness_max"]),
        "tokens_sampled": int(plan["stats"]["tokens_sampled"]),
        **_per_token(result.metrics),
    }


def _scaling(recipe: Recipe, result: StepResult) -> dict[str, float]:
    """fp16's loss scale, and how often the step was repeated because its gradients overflowed."""
    return {"loss_scale": result.loss_scale, "overflows": result.overflows} if recipe.model.dtype is Dtype.fp16 else {}


def _per_token(sums: dict[str, float]) -> dict[str, float]:
    """Loss metrics as means over the computed tokens; maxima as they are."""
    tokens = sums.pop("tokens", 0.0)
    return {
        name.replace("max/", "largest_"): value if name.startswith("max/") else value / tokens
        for name, value in sums.items()
        if tokens or name.startswith("max/")
    }


def _shuffled(rewards: list[list[float]], seed: int, version: int) -> list[list[float]]:
    """The control experiment: rewards permuted over the whole batch, the same way on every rank."""
    flat = [r for group in rewards for r in group]
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed * 1_000_003 + version)).tolist()
    permuted = iter([flat[i] for i in order])
    return [list(itertools.islice(permuted, len(group))) for group in rewards]


# --- publish, evaluate, save ----------------------------------------------------------------------


class WeightsNotServed(RuntimeError):
    """A publish left no engine with proven weights."""


def publish_version(t: Trainer, version: int) -> None:
    """Moves the trainer's weights to every engine and has them proven. Collective.

    An engine whose canary disagrees, or that failed on the way, gets no requests; the run goes on with the others.

    Raises:
        WeightsNotServed: no engine holds proven weights, with each engine's numbers.
    """
    rows = canary.score(t.models, t.hf_config["vocab_size"], t.recipe.weights.canary_tokens, seed=t.recipe.seed)
    settle(t.models)
    dtype = TORCH_DTYPE[t.recipe.rollout.dtype]
    # An engine that does not draft has no place for the heads of multi-token prediction.
    tensors = iterate_hf(t.models, t.hf_config, t.rank, dtype, heads=False)
    if not t.rank.is_first:
        for _ in tensors:
            pass
        return
    assert t.publisher is not None and t.coordinator is not None and t.metrics is not None
    whole = ((name, tensor) for name, tensor in tensors if tensor is not None)
    report = t.publisher.publish(
        version, _manifest(t.hf_config, dtype), whole, Canary([r.ids for r in rows], [r.logprobs[1:] for r in rows])
    )
    for name, outcome in report.engines.items():
        state = "proven" if outcome.state == "proven" else "failed"
        t.coordinator.version(version, name, state, outcome.gap, report.seconds["total"])
    t.metrics.log(
        "publish",
        version,
        {"version": version, "gap": report.gap, "bytes": report.nbytes, "engines_proven": len(report.proven)}
        | {f"{phase}_s": seconds for phase, seconds in report.seconds.items()},
    )
    for problem in report.problems():
        print(f"publish of version {version}: {problem}", flush=True)
    if not report.proven:
        raise WeightsNotServed(f"version {version} is served by no engine: {'; '.join(report.problems())}")


def _manifest(hf_config: dict[str, Any], dtype: torch.dtype) -> Manifest:
    """What a publish must deliver: the tensors of `iterate_hf`, in its order."""
    keep = fp32_tensors(hf_config)
    return Manifest(
        tuple(
            TensorInfo(name, shape, str(torch.float32 if name in keep else dtype).removeprefix("torch."))
            for name, shape in hf_tensors(hf_config).items()
        )
    )


def evaluate(t: Trainer, tag: str, version: int) -> None:
    """Held-out evaluation on the present weights; rank 0 waits for it, the others wait for rank 0."""

    def run() -> bool:
        assert t.coordinator is not None and t.metrics is not None
        t0 = time.perf_counter()
        with t.events.span("eval", tag=tag, version=version):
            reply = t.coordinator.evaluate(tag, version, t.recipe.deadlines.eval)
        line = {
            "tag": tag,
            "version": version,
            "size": reply["size"],
            "finished": reply["finished"],
            "success": reply["success"],
            "tokens_sampled": reply["tokens"],
            "seconds": time.perf_counter() - t0,
        }
        own = {name if name == "reward" else f"agent/{name}": value for name, value in reply["metrics"].items()}
        t.metrics.log("eval", version, line | own)
        return True

    from_rank0(run)


def save_checkpoint(t: Trainer, saver: Saver, optimizer: Any, version: int) -> None:
    """Saves version `version`; in the background, only until its content is fixed."""
    settle(t.models)
    with t.events.span("checkpoint", version=version):
        coordinator = t.coordinator

        def snapshot(folder: Path) -> None:
            if coordinator is not None:
                coordinator.checkpoint(version, str(folder))

        saver.save(t.models, optimizer, version, {"version": version}, before_complete=snapshot)


def export(t: Trainer, folder: Path) -> None:
    """Writes the model as a Hugging Face checkpoint. Collective."""
    settle(t.models)
    tensors = iterate_hf(t.models, t.hf_config, t.rank, TORCH_DTYPE[t.recipe.model.dtype])
    with t.events.span("export"):
        save_hf(folder, Path(t.recipe.model.path), tensors)
        dist.barrier()
