"""Checkpoints in the background: of the moment they were asked for, complete or not there, never silently lost."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import processes
import pytest
import trainer_toy as toy
from torch.distributed.checkpoint import CheckpointException

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import checkpoint, optimizer
from megatron_agentrl.trainer.checkpoint_saver import LateSave, Saver
from megatron_agentrl.trainer.step import train_step

HERE = Path(__file__).parent
MOMENTS = ("exp_avg", "exp_avg_sq")


def steps(chunks, opt, first: int, last: int) -> list[float]:
    return [
        train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=1e-2, tokens=toy.TOKENS, step=k).loss
        for k in range(first, last)
    ]


def saver(folder: Path, *, keep: int = 2, deadline: float = 60.0, asynchronous: bool = True) -> Saver:
    return Saver(folder, asynchronous=asynchronous, keep=keep, deadline=deadline)


class Held:
    """A file system that does not take the data before it is told to: the writer's first file is a pipe."""

    def __init__(self, tmp: Path) -> None:
        self.pipe = tmp / "__0_0.distcp"
        os.mkfifo(self.pipe)

    def release(self) -> None:
        threading.Thread(target=lambda: self.pipe.read_bytes(), daemon=True).start()


@pytest.mark.parametrize("kind", [Topology(), Topology(distributed_optimizer=False)], ids=["sharded", "whole"])
def test_what_is_saved_is_the_moment_of_the_call_not_of_the_writing(rank, tmp_path, kind):
    chunks, opt = toy.build("nemotron", rank, toy.ADAM, kind)
    steps(chunks, opt, 1, 3)
    started = checkpoint.start(tmp_path, chunks, opt, 2, {"version": 2}, copy=True)
    want = steps(chunks, opt, 3, 6)  # the writer has not begun
    started.write()
    folder = checkpoint.finish(started)
    chunks, opt = toy.build("nemotron", rank, toy.ADAM, kind)
    assert checkpoint.load(folder, chunks, opt) == {"version": 2}
    assert steps(chunks, opt, 3, 6) == want
    assert checkpoint.check(folder)["optimizer_step"] == 2


def test_a_save_is_complete_at_a_poll_and_older_ones_are_removed_then(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    writer, seen = saver(tmp_path, keep=1), []
    for step in (1, 2):
        snapshot = (lambda at: lambda tmp: seen.append(at) or (tmp / "ledger").write_text(str(at)) and None)(step)
        assert writer.save(chunks, opt, step, {}, snapshot) is None
        assert seen[-1] == step  # the coordinator's snapshot is of this moment
        assert checkpoint.newest(tmp_path).step == step - 1  # not complete before a poll
        assert writer.wait() == tmp_path / f"step_{step}"
    assert writer.wait() is None and writer.poll() is None
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert (tmp_path / "step_2" / "ledger").read_text() == "2"


def test_at_most_one_is_in_flight_the_next_save_completes_the_one_before(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    writer = saver(tmp_path)
    for step in (1, 2):
        writer.save(chunks, opt, step, {})
    assert checkpoint.newest(tmp_path).step == 1
    writer.wait()
    assert checkpoint.newest(tmp_path).step == 2


def test_a_failed_write_ends_the_run_at_the_next_poll_by_name(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    writer = saver(tmp_path)
    writer.save(chunks, opt, 5, {}, lambda tmp: (tmp / "__0_0.distcp").mkdir())  # where the data should go
    with pytest.raises(CheckpointException, match="IsADirectoryError|Is a directory|Worker failure") as error:
        writer.wait()
    assert "step_5 was not written" in error.value.__notes__[0]
    assert checkpoint.newest(tmp_path).path is None


def test_while_a_rank_writes_polls_let_training_go_on_until_the_deadline(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    held: list[Held] = []
    writer = saver(tmp_path, deadline=2.0)
    writer.save(chunks, opt, 3, {}, lambda tmp: held.append(Held(tmp)))
    assert writer.poll() is None
    assert steps(chunks, opt, 1, 2)
    assert checkpoint.newest(tmp_path).path is None
    with pytest.raises(LateSave, match=r"step_3.tmp: ranks \[0\] are still writing after 2 s .deadlines.checkpoint=2."):
        writer.wait()
    held[0].release()


def test_without_it_a_save_is_complete_when_it_returns(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    assert saver(tmp_path, asynchronous=False).save(chunks, opt, 4, {}) == tmp_path / "step_4"
    assert checkpoint.newest(tmp_path).step == 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two data-parallel ranks found in `saver_worker`."""
    shared = tmp_path_factory.mktemp("pair")
    processes.run("saver_worker.py", 2, shared, str(shared))
    return [json.loads((shared / f"{index}.json").read_text()) for index in range(2)]


def test_two_ranks_train_on_while_one_writes_and_complete_together(pair):
    for found in pair:
        assert found["polls"] == [None, None, None] and found["newest_meanwhile"] == 0
        assert found["completed"] == "step_2" and found["newest"] == 2
        assert found["again"] == found["went_on"]  # what was saved is the moment of the call, on both


def test_both_ranks_raise_that_one_is_late(pair):
    for found in pair:
        assert "ranks [1] are still writing after" in found["late"] and "deadlines.checkpoint=1" in found["late"]


def test_a_checkpoint_of_bf16_weights_gives_every_rank_of_an_fp32_run_the_same_masters(pair):
    for found in pair:
        assert found["unequal"] == [] and found["rounded"] == 0


FAILING = """
import io, sys, time
from pathlib import Path
from megatron_agentrl.cpu import megatron
megatron.install()
import trainer_toy as toy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from test_checkpoint_saver import saver
from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import topology

class Slow(io.FileIO):
    def write(self, data):  # called from torch's C++, which cannot be left by the end of the interpreter
        time.sleep(0.05)
        return super().write(data)

rank = topology.init(Topology(), seed=1, timeout=60)
chunks, opt = toy.build("qwen", rank, toy.ADAM)
writer = saver(Path(sys.argv[1]))
writer.save(chunks, opt, 1, {})
writer.wait()
filesystem_async.open = Slow
writer.save(chunks, opt, 2, {})
time.sleep(0.3)
raise OSError("engine gone")
"""


def test_a_run_that_fails_while_it_writes_ends_at_once_and_goes_on_from_the_checkpoint_before(tmp_path):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent.parent), str(HERE)]), OMP_NUM_THREADS="1")
    failed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAILING, str(tmp_path)], env=env, timeout=200, capture_output=True
    )
    assert failed.stderr.decode().rstrip().endswith("OSError: engine gone")  # and no "terminate called" after it
    assert failed.returncode == 1
    found = checkpoint.newest(tmp_path)
    assert found.step == 1
    assert found.skipped == ["step_2.tmp: not step_N; an interrupted save or removal left it"]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("limit", [3_000, 60_000], ids=["nothing fits", "one file fits"])
def test_a_full_disk_is_named_and_a_later_save_has_room_again(rank, tmp_path, asynchronous, limit):
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    writer = saver(tmp_path, asynchronous=asynchronous)
    largest, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))  # writing beyond it fails as on a full disk
    try:
        with pytest.raises(CheckpointException, match="File too large") as error:
            writer.save(chunks, opt, 2, {})
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
    assert "step_2 was not written" in error.value.__notes__[0]
    assert checkpoint.newest(tmp_path).path is None
    writer.save(chunks, opt, 2, {})
    writer.wait()
    assert checkpoint.newest(tmp_path).step == 2


def test_a_save_that_is_waited_for_copies_no_host_tensor_and_one_in_the_background_each(rank, tmp_path):
    """fp32, one data-parallel rank: moments are the optimizer's own; weights are parts of one buffer, which the writer
    copies in any case."""
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    steps(chunks, opt, 1, 2)
    own = {s[kind].data_ptr() for p in optimizer.parts(opt) for s in p.optimizer.state.values() for kind in MOMENTS}
    # Gate and up projections of the 24 experts stand as two tensors each, which are parts of one too.
    for copy, shared in ((False, len(own) - 2 * 24), (True, 0)):
        started = checkpoint.start(tmp_path, chunks, opt, 1, {}, copy=copy)
        _, buckets, _ = started.request.async_fn_args
        tensors = [tensor for _, _, (_, pairs) in buckets for _, tensor in pairs]
        assert len({tensor.data_ptr() for tensor in tensors} & own) == shared
        started.write()
        checkpoint.finish(started)
