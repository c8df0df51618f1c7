"""Checkpoints: bit-exact resume, complete or not there, numbers compared as numbers."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
import trainer_toy as toy

from megatron_agentrl.recipe.schema import Optimizer
from megatron_agentrl.trainer import checkpoint, optimizer
from megatron_agentrl.trainer.step import train_step


def steps(chunks, opt, first: int, last: int) -> list[float]:
    return [
        train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=1e-2, tokens=toy.TOKENS, step=k).loss
        for k in range(first, last)
    ]


@pytest.fixture(scope="module")
def saved(rank, tmp_path_factory):
    """A run of 6 Adam steps saved after 3: (folder, losses 4 to 6, random numbers drawn after the save)."""
    folder = tmp_path_factory.mktemp("run")
    chunks, opt = toy.build("nemotron", rank, toy.ADAM)
    steps(chunks, opt, 1, 4)
    checkpoint.save(
        folder, chunks, opt, 3, {"step": 3, "note": "é"}, lambda tmp: (tmp / "ledger").write_text("rows") and None
    )
    drawn = (random.random(), float(torch.rand(())))
    return folder, steps(chunks, opt, 4, 7), drawn


def test_losses_after_a_load_equal_the_uninterrupted_run_bit_for_bit(rank, saved):
    folder, want, drawn = saved
    chunks, opt = toy.build("nemotron", rank, toy.ADAM)
    assert checkpoint.load(folder / "step_3", chunks, opt) == {"step": 3, "note": "é"}
    assert (random.random(), float(torch.rand(()))) == drawn
    assert steps(chunks, opt, 4, 7) == want


def test_moments_and_step_are_restored_for_each_parameter_on_its_own(rank, saved):
    chunks, opt = toy.build("nemotron", rank, toy.ADAM)
    checkpoint.load(saved[0] / "step_3", chunks, opt)
    states = [state for part in optimizer.parts(opt) for state in part.optimizer.state.values()]
    assert {float(state["step"]) for state in states} == {3.0}
    assert len({state["step"].data_ptr() for state in states}) == len(states)  # none shared
    assert all(float(state["exp_avg_sq"].abs().sum()) > 0 for state in states)
    steps(chunks, opt, 4, 5)
    assert {float(state["step"]) for state in states} == {4.0}


def test_a_resumed_run_saves_a_checkpoint_of_its_own(rank, saved, tmp_path):
    chunks, opt = toy.build("nemotron", rank, toy.ADAM)
    checkpoint.load(saved[0] / "step_3", chunks, opt)
    steps(chunks, opt, 4, 6)
    folder = checkpoint.save(tmp_path, chunks, opt, 5, {})
    assert checkpoint.check(folder)["optimizer_step"] == 5


def test_a_load_over_a_trained_optimizer_equals_a_load_into_a_fresh_one(rank, saved):
    chunks, opt = toy.build("nemotron", rank, toy.ADAM)
    steps(chunks, opt, 1, 3)
    checkpoint.load(saved[0] / "step_3", chunks, opt)
    assert steps(chunks, opt, 4, 7) == saved[1]


def test_a_checkpoint_before_the_first_step(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    checkpoint.save(tmp_path, chunks, opt, 0, {})
    want = steps(chunks, opt, 1, 3)
    chunks, opt = toy.build("qwen", rank, toy.ADAM)
    checkpoint.load(tmp_path / "step_0", chunks, opt)
    assert steps(chunks, opt, 1, 3) == want


def test_sgd_resumes_too_and_the_next_phase_may_start_another_optimizer(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.SGD)
    steps(chunks, opt, 1, 2)
    checkpoint.save(tmp_path, chunks, opt, 1, {})
    want = steps(chunks, opt, 2, 4)
    chunks, opt = toy.build("qwen", rank, toy.SGD)
    checkpoint.load(tmp_path / "step_1", chunks, opt)
    assert steps(chunks, opt, 2, 4) == want
    steps(chunks, optimizer.build(chunks, Optimizer(name="adam")), 4, 5)
    sharded, _ = toy.build("qwen", rank, toy.ADAM)
    with pytest.raises(ValueError, match="cannot follow the optimizer"):
        optimizer.build(sharded, toy.SGD)


def test_saving_a_step_again_replaces_it(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.SGD)
    for note in ("first", "second"):
        checkpoint.save(tmp_path, chunks, opt, 7, {"note": note})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_7"]
    assert checkpoint.load(tmp_path / "step_7", chunks, opt) == {"note": "second"}


def copy(saved, tmp_path, step):
    target = tmp_path / f"step_{step}"
    shutil.copytree(saved[0] / "step_3", target)
    return target


def test_what_is_not_whole_cannot_be_loaded(rank, saved, tmp_path):
    chunks, opt = toy.build("nemotron", rank, toy.ADAM)
    unmarked, cut, short = (copy(saved, tmp_path, step) for step in (4, 5, 6))
    (unmarked / checkpoint.MARK).unlink()
    data = next(cut.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    (short / "ledger").unlink()
    for folder, words in ((unmarked, "no complete.json"), (cut, "has .* bytes"), (short, "ledger is missing")):
        with pytest.raises(checkpoint.IncompleteCheckpoint, match=words):
            checkpoint.load(folder, chunks, opt)


def test_newest_compares_numbers_and_says_what_it_passed_over(saved, tmp_path):
    for step in (9, 10, 100):
        copy(saved, tmp_path, step)
    (tmp_path / "step_100" / checkpoint.MARK).unlink()
    copy(saved, tmp_path, "200.tmp")
    (tmp_path / "reference").mkdir()
    found = checkpoint.newest(tmp_path)
    assert (found.path, found.step) == (tmp_path / "step_10", 10)
    assert len(found.skipped) == 2
    assert "step_200.tmp" in found.skipped[0] and "step_100: no complete.json" in found.skipped[1]
    assert checkpoint.newest(tmp_path / "nothing") == (None, 0, [])


def test_prune_keeps_the_newest_numbers_and_removes_what_interrupted_saves_left(saved, tmp_path):
    for step in (2, 9, 10, "11.tmp"):
        copy(saved, tmp_path, step)
    (tmp_path / "step_12").mkdir()  # incomplete: left for a person
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_12", "step_9"]
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.prune(tmp_path, keep=0)


@pytest.mark.parametrize("mark", ["", "[]", "{}", '{"format": 1'])
def test_a_damaged_mark_is_passed_over_like_any_incomplete_checkpoint(saved, tmp_path, mark):
    copy(saved, tmp_path, 1)
    (copy(saved, tmp_path, 2) / checkpoint.MARK).write_text(mark)
    found = checkpoint.newest(tmp_path)
    assert found.step == 1 and "step_2: complete.json is damaged" in found.skipped[0]


def test_prune_does_not_give_up_a_good_checkpoint_for_a_damaged_one(saved, tmp_path):
    """The run fell back to an older step, since a file of the newest was lost, and has just saved step 5."""
    (copy(saved, tmp_path, 9) / "ledger").unlink()
    copy(saved, tmp_path, 4)
    copy(saved, tmp_path, 5)
    assert [path.name for path in checkpoint.prune(tmp_path, keep=1)] == ["step_4"]
    assert checkpoint.newest(tmp_path).step == 5


def test_what_an_interrupted_prune_leaves_is_no_checkpoint_and_the_next_one_removes_it(saved, tmp_path, monkeypatch):
    for step in (1, 2):
        copy(saved, tmp_path, step)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        checkpoint.prune(tmp_path, keep=1)
    assert checkpoint.newest(tmp_path).step == 2
    checkpoint.prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_save_that_dies_before_the_mark_leaves_no_checkpoint(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.SGD)

    def die(tmp):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, chunks, opt, 5, {}, die)
    assert checkpoint.newest(tmp_path).path is None
    checkpoint.save(tmp_path, chunks, opt, 5, {})
    assert checkpoint.newest(tmp_path).step == 5


def test_the_mark_lists_every_file(saved):
    folder = saved[0] / "step_3"
    mark = json.loads((folder / checkpoint.MARK).read_text())
    assert mark["step"] == mark["optimizer_step"] == 3 and mark["world"] == 1
    assert set(mark["files"]) == {p.name for p in folder.iterdir()} - {checkpoint.MARK}


def test_extra_must_be_json_before_anything_is_written(rank, tmp_path):
    chunks, opt = toy.build("qwen", rank, toy.SGD)
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, chunks, opt, 1, {"tensor": torch.zeros(2)})
    assert list(tmp_path.iterdir()) == []
