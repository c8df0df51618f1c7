"""Distributed checkpoints that are either complete or not there.

`save` (or its three parts: `start`, `Started.write`, `finish`) writes `step_N.tmp`, then a mark that lists every file
with its size, then renames to `step_N`; a process killed at any moment leaves a folder that `newest` and `load` refuse.
Weights and optimizer state are megatron-core's `torch_dist` format under Transformer Engine's key names, per
parameter, so that another parallel layout can load them. Schedules and anything else of the run travel in `extra`
(JSON). When a run saves is `trainer.checkpoint_saver`.

Left out on purpose: megatron-core's `_extra_state` entries (empty without delayed-scaling fp8, and named
differently with and without Transformer Engine), and the optimizer's parameter groups, whose values the recipe
sets before each step. Adam's step count and fp16's loss scale stand in the mark.
"""

from __future__ import annotations

import json
import queue
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer import distrib_optimizer as _distrib
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from megatron_agentrl.trainer import loss_scale, optimizer_state
from megatron_agentrl.trainer.checkpoint_match import check_same_model, has_other_type
from megatron_agentrl.trainer.complete import MARK, IncompleteCheckpoint, check, publish, write_mark
from megatron_agentrl.trainer.optimizer import inner_optimizers, parts

__all__ = ["MARK", "IncompleteCheckpoint", "check"]  # of checkpoints in general: `trainer.complete`
_STEP = re.compile(r"step_(\d+)")


class Newest(NamedTuple):
    """The newest complete checkpoint (None if there is none) and why newer or other folders were passed over."""

    path: Path | None
    step: int
    skipped: list[str]


@dataclass
class Started:
    """A checkpoint whose content is fixed and planned, but not on disk: `write` it, then `finish` it."""

    tmp: Path
    final: Path
    facts: dict[str, Any]
    request: AsyncRequest
    abandoned: threading.Event = field(default_factory=threading.Event)

    def write(self) -> None:
        """Put this rank's tensors on disk. Not collective, touches neither model nor device: any thread may run it.

        A failure is raised by `finish`, on every rank. Once `abandoned` is set, it fails at the next tensor.
        """
        if self.request.async_fn is None:
            return  # a rank may have nothing to write
        # megatron-core's own function for all files keeps the reason of a failure to itself (an assertion on its type),
        # and where any file but the last failed, raises it here, on this rank alone.
        transforms, cloud = self.request.async_fn.args
        _, buckets, results = self.request.async_fn_args
        outcomes: list[Any] = [None] * len(buckets)

        def one(at: int) -> None:
            file, key, (objects, tensors) = buckets[at]
            bucket = (file, key, (objects, self._unless_abandoned(tensors)))
            _, outcomes[at] = filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, at, bucket, None, None, use_fsync=True, use_msc=cloud
            )

        threads = [threading.Thread(target=one, args=(at,), daemon=True) for at in range(1, len(buckets))]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        failed = [outcome for outcome in outcomes if not isinstance(outcome, list)]
        results.put(failed[0] if failed else dict(enumerate(outcomes)))

    def _unless_abandoned(self, tensors: list[Any]) -> Iterator[Any]:
        for tensor in tensors:
            if self.abandoned.is_set():
                raise RuntimeError(f"{self.tmp}: the run ended while this was being written")
            yield tensor


def start(
    folder: Path,
    models: list[Any],
    optimizer: Any,
    step: int,
    extra: dict[str, Any],
    before_complete: Callable[[Path], None] | None = None,
    copy: bool = False,
) -> Started:
    """Fix the content of `folder/step_{step}`. Collective; arguments as for `save`.

    Args:
        copy: copy on the host also what is there already, so that training may go on before the checkpoint is written.
    """
    folder = Path(folder)
    final, tmp = folder / f"step_{step}", folder / f"step_{step}.tmp"
    text = json.dumps(extra, indent=1)  # refused before anything is written
    _make_empty(tmp)
    weights = _model_state(models)
    state = dict(weights)
    if optimizer_state.has_moments(optimizer):
        state["optimizer"] = optimizer_state.to_save(optimizer, models, weights, copy)
    if copy:
        _copy_host_tensors(weights)
    state["rng"] = _rng_object(_rng_state())
    request = _request(state, tmp)
    facts: dict[str, Any] = {"step": step, "layout": _layout(), "optimizer_step": _adam_step(optimizer)}
    facts["loss_scale"] = loss_scale.state(parts(optimizer))
    if dist.get_rank() == 0:
        (tmp / "extra.json").write_text(text)
        if before_complete is not None:
            before_complete(tmp)
    return Started(tmp, final, facts, request)


def finish(started: Started) -> Path:
    """Declare a written checkpoint complete; returns its final folder. Collective.

    Raises:
        CheckpointException: on every rank, where a rank failed to write.
    """
    for finalize in started.request.finalize_fns:
        finalize()
    if dist.get_rank() == 0:
        write_mark(started.tmp, {"world": dist.get_world_size(), **started.facts})
        publish(started.tmp, started.final)
    dist.barrier()
    return started.final


def save(
    folder: Path,
    models: list[Any],
    optimizer: Any,
    step: int,
    extra: dict[str, Any],
    before_complete: Callable[[Path], None] | None = None,
) -> Path:
    """Write `folder/step_{step}`. Collective.

    Args:
        folder: the run's checkpoint folder, the same for every rank (a shared file system across nodes).
        extra: JSON-serialisable state of the run; the first rank's is written.
        before_complete: called on the first rank with the folder being written, before it is declared
            complete: whatever it adds there (a ledger's snapshot) is part of the checkpoint.

    Returns the final folder. An existing `step_{step}` is replaced.
    """
    started = start(folder, models, optimizer, step, extra, before_complete)
    started.write()
    return finish(started)


def load(folder: Path, models: list[Any], optimizer: Any) -> dict[str, Any]:
    """Read a complete checkpoint into the model and the optimizer; returns `extra`. Collective.

    The parallel layout and model.dtype may differ from those that wrote it: weights of another type are made from the
    float32 ones in the optimizer's state, where it has any. The random state is restored when it is the same, and
    left as `topology.init` seeded it otherwise: which ranks draw alike depends on the layout, not on their number.

    Raises:
        IncompleteCheckpoint: the folder was never completed, or a file of it is missing or truncated.
        OtherModel: the folder holds the weights of another model.
    """
    folder = Path(folder)
    mark = check(folder)
    state = _model_state(models)
    other_type = has_other_type(check_same_model(folder, state), state)
    has_moments = optimizer_state.has_moments(optimizer)
    if has_moments:
        _fill_state(optimizer)
        state["optimizer"] = optimizer_state.to_load(optimizer, models, state)
    same_layout = mark.get("layout") == _layout()
    if same_layout:
        state["rng"] = _rng_object(None)
    loaded = dist_checkpointing.load(state, str(folder))
    _put_model(models, loaded)
    if has_moments:
        optimizer_state.put(optimizer, models, loaded["optimizer"])
        if other_type:
            optimizer_state.give_model_its_weights(optimizer, models)
        _set_adam_step(optimizer, mark["optimizer_step"])
        loss_scale.restore(parts(optimizer), mark.get("loss_scale"))
    if same_layout:
        _put_rng(loaded["rng"])
    return json.loads((folder / "extra.json").read_text())


def save_weights(folder: Path, models: list[Any]) -> Path:
    """Write the weights alone, under exactly this folder name (the KL reference). Collective."""
    folder = Path(folder)
    tmp = folder.with_name(folder.name + ".tmp")
    _make_empty(tmp)
    started = Started(tmp, folder, {"step": 0, "optimizer_step": 0}, _request(_model_state(models), tmp))
    started.write()
    return finish(started)


def load_weights(folder: Path, models: list[Any]) -> None:
    """Read the weights alone; build the optimizer afterwards. Collective.

    Raises:
        IncompleteCheckpoint, OtherModel: see `load`.
    """
    check(Path(folder))
    state = _model_state(models)
    check_same_model(Path(folder), state)
    _put_model(models, dist_checkpointing.load(state, str(folder)))


def newest(folder: Path) -> Newest:
    """The complete checkpoint of the highest step (compared as numbers), with the reason for each folder skipped."""
    steps: list[tuple[int, Path]] = []
    skipped = []
    for path in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []:
        if not path.is_dir() or not path.name.startswith("step_"):
            continue
        match = _STEP.fullmatch(path.name)
        if match is None:
            skipped.append(f"{path.name}: not step_N; an interrupted save or removal left it")
        else:
            steps.append((int(match[1]), path))
    for step, path in sorted(steps, reverse=True):
        try:
            check(path)
        except IncompleteCheckpoint as error:
            skipped.append(str(error))
            continue
        return Newest(path, step, skipped)
    return Newest(None, 0, skipped)


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest complete checkpoints, and what interrupted saves left. First rank only.

    Folders that are incomplete or damaged under a final name are kept for a person to look at, and do not count.
    Returns what was removed.

    Raises:
        ValueError: keep is below 1.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep={keep}: at least one checkpoint must stay")
    complete, removed = [], []
    for path in Path(folder).iterdir():
        match = _STEP.fullmatch(path.name)
        if match is None:
            if path.is_dir() and path.name.startswith("step_") and path.name.endswith(".tmp"):
                removed.append(path)
        elif _whole(path):
            complete.append((int(match[1]), path))
    removed += [path for _, path in sorted(complete, reverse=True)[keep:]]
    for path in removed:
        # Under this name it is no checkpoint: what an interrupted removal leaves is removed by the next one.
        doomed = path if path.suffix == ".tmp" else path.rename(path.with_name(f"{path.name}.removed.tmp"))
        shutil.rmtree(doomed)
    return removed


def _make_empty(folder: Path) -> None:
    """For all ranks to write into; what an interrupted save left there goes. Collective."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()


def _whole(folder: Path) -> bool:
    try:
        check(folder)
    except IncompleteCheckpoint:
        return False
    return True


def _copy_host_tensors(state: dict[str, Any]) -> None:
    """Part the state from what training changes. Tensors on a device are copied by the request itself."""
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data.device.type == "cpu":
            entry.data = entry.data.detach().clone()


def _request(state: dict[str, Any], folder: Path) -> AsyncRequest:
    """megatron-core's plan of who writes what, with this rank's tensors on the host. Collective."""
    # It collects the writers' results through a manager process by default; started by "spawn", that imports the
    # program's main module again and stays alive. Writers are threads here, for which a plain queue is enough.
    filesystem_async._results_queue = queue.Queue()
    torch_strategy._logged_mcore_async_deprecation = True  # it advises a package that writes by processes
    request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")
    if request.preload_fn is not None:
        rank, _, results = request.async_fn_args
        request = request._replace(async_fn_args=(rank, request.preload_fn(), results), preload_fn=None)
    return request


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }


def _model_state(models: list[Any]) -> dict[str, Any]:
    """Sharded state of the model chunks, under "model" or "model0", "model1", ..."""
    state = {}
    for index, chunk in enumerate(models):
        sharded = chunk.module.sharded_state_dict(metadata=_metadata())
        state["model" if len(models) == 1 else f"model{index}"] = {
            name: value for name, value in sharded.items() if "_extra_state" not in name
        }
    return state


def _put_model(models: list[Any], loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(models):
        tensors = loaded["model" if len(models) == 1 else f"model{index}"]
        # The model itself: megatron-core's wrapper for half types loads, but does not say what was missing.
        missing, unexpected = unwrap_model(chunk).load_state_dict(tensors, strict=False)
        missing = [name for name in missing if "_extra_state" not in name]
        if missing or unexpected:
            raise IncompleteCheckpoint(f"model chunk {index}: missing {missing}, unexpected {list(unexpected)}")


def _fill_state(optimizer: Any) -> None:
    """Give Adam, before its first step, room for the state that is about to be loaded."""
    for part in parts(optimizer):
        if _distrib.HAVE_APEX_OR_TE and isinstance(part, _distrib.DistributedOptimizer):
            part.load_state_dict(part.state_dict())  # megatron-core's own way to allocate it
            continue
        for group in part.optimizer.param_groups if part.optimizer is not None else []:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if not state:
                    if not _distrib.HAVE_APEX_OR_TE:
                        state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)


def _adam_step(optimizer: Any) -> int:
    """How many steps Adam has taken: per parameter in torch, per group in Transformer Engine and apex."""
    steps = {int(s["step"]) for inner in inner_optimizers(optimizer) for s in inner.state.values() if "step" in s}
    if not steps:
        steps = {
            int(group["step"])
            for inner in inner_optimizers(optimizer)
            for group in inner.param_groups
            if group["params"] and "step" in group
        }
    if len(steps) > 1:
        raise RuntimeError(f"parameters disagree on the optimizer's step: {sorted(steps)}")
    return steps.pop() if steps else 0


def _set_adam_step(optimizer: Any, step: int) -> None:
    """Set the step count: a tensor of its own per parameter in torch; in Transformer Engine and apex a number of each
    group that has parameters, which is not there before the first step (and without it they would count from 1)."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            if "step" in group or (_distrib.HAVE_APEX_OR_TE and group["params"] and step):
                group["step"] = step
        for state in inner.state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], float(step))


def _layout() -> dict[str, int]:
    """The sizes that decide which rank draws which random numbers."""
    ps = parallel_state
    return {
        "world": dist.get_world_size(),
        "tp": ps.get_tensor_model_parallel_world_size(),
        "pp": ps.get_pipeline_model_parallel_world_size(),
        "cp": ps.get_context_parallel_world_size(),
        "ep": ps.get_expert_model_parallel_world_size(),
        "etp": ps.get_expert_tensor_parallel_world_size(),
    }


def _rng_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(numpy.asarray(keys).astype("int64")),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state().cpu(),
        "tracker": {name: state.cpu() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def _put_rng(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["tracker"]))


def _rng_object(state: dict[str, Any] | None) -> ShardedObject:
    """One entry a process."""
    return ShardedObject("rng", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
