"""Checkpoints in the background: of the moment they were asked for, complete or not there, never silently lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trainer_toy as toy
from torch.distributed.checkpoint import CheckpointException

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import checkpoint
from megatron_agentrl.trainer.checkpoint_saver import LateSave, Saver
from megatron_agentrl.trainer.step import train_step

HERE = Path(__file__).parent


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


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_agentrl.cpu import megatron
megatron.install()
import trainer_toy as toy
from test_checkpoint_saver import Held, saver
from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import topology
rank = topology.init(Topology(), seed=1, timeout=60)
chunks, opt = toy.build("qwen", rank, toy.ADAM)
writer = saver(Path(sys.argv[1]))
writer.save(chunks, opt, 1, {})
writer.wait()
writer.save(chunks, opt, 2, {}, Held)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent.parent), str(HERE)]), OMP_NUM_THREADS="1")
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)], env=env, timeout=200)
    assert killed.returncode == -signal.SIGKILL
    found = checkpoint.newest(tmp_path)
    assert found.step == 1
    assert found.skipped == ["step_2.tmp: not step_N; an interrupted save or removal left it"]
