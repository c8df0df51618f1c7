"""Exactly once: over drops, failures, kills and resumes, each prompt trains as often as in an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from coordinator_fakes import Clock, answer_all, plan_of, prompts, prompts_of, receipt, recipe, start

from megatron_agentrl.coordinator.ledger import Ledger
from megatron_agentrl.coordinator.rows import LedgerError
from megatron_agentrl.coordinator.service import Coordinator, ProtocolError
from megatron_agentrl.data.stream import Stream
from megatron_agentrl.recipe.schema import Order
from megatron_agentrl.trajectory.types import Where


def train(coordinator: Coordinator, step: int) -> list[int]:
    """Trains the plan of `step` and proves the next version; the stream positions trained."""
    plan = plan_of(coordinator, step)
    assert plan is not None, coordinator.batch(step)
    coordinator.trained(step, {"loss": 0.25})
    coordinator.version("engine-0", step + 1, "proven")
    coordinator.ledger.commit()
    return prompts_of(plan)


def again(coordinator: Coordinator, path: Path, step: int, folder: Path | None) -> Coordinator:
    """Kills the coordinator (nothing uncommitted is kept), starts another, resumes it, and proves version `step`."""
    coordinator.ledger.commit()
    coordinator.ledger.store.close()
    coordinator = start(path, coordinator.recipe, coordinator.prompts)
    coordinator.resume(step, folder)
    coordinator.version("engine-0", step, "proven")
    return coordinator


def test_the_buffer_survives_a_kill_so_no_prompt_is_skipped(tmp_path):
    coordinator = start(tmp_path, recipe(batch=2, eta=2, epochs=1), prompts(12))
    coordinator.version("engine-0", 0, "proven")
    assert len(answer_all(coordinator, 0)) == 6
    trained = [train(coordinator, 0)]
    folder = tmp_path / "step_1"
    folder.mkdir()
    coordinator.checkpoint(1, folder)
    coordinator = again(coordinator, tmp_path, 1, folder)
    for step in range(1, 6):
        answer_all(coordinator, step)
        trained.append(train(coordinator, step))
    assert trained == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    answer_all(coordinator, 6)
    assert coordinator.batch(6).status == "exhausted"
    assert coordinator.ledger.balance() == (12, 12, 0, 0, 0, 0, 0, 0)


def test_the_remainder_trains_as_a_smaller_batch_where_the_recipe_says_so(tmp_path):
    coordinator = start(tmp_path, recipe(batch=2, eta=2, epochs=1, train_remainder=True), prompts(5))
    coordinator.version("engine-0", 0, "proven")
    answer_all(coordinator, 0)
    assert [train(coordinator, step) for step in range(3)] == [[0, 1], [2, 3], [4]]
    assert coordinator.batch(3).status == "exhausted"


def test_a_stale_group_is_asked_again_and_no_later_one_trains_twice(tmp_path):
    run = recipe(batch=1, group_size=1, eta=1, epochs=1)
    run.staleness.order = Order.completion  # the order in which a slow group can fall behind
    coordinator = start(tmp_path, run, prompts(6))
    coordinator.version("engine-0", 0, "proven")
    trained: list[list[int]] = []
    slow = None
    for step in range(5):
        for work in coordinator.work("worker-0", 100):
            if work.task_id == "t000002":
                slow = receipt("t000002", 0, {step: 4})  # sampled now, delivered when it is too old
            else:
                coordinator.receipts([receipt(work.task_id, 0, {step: 4})])
        if slow is not None and step == 3:
            coordinator.receipts([slow])
        trained.append(train(coordinator, step))
        if step == 3:
            folder = tmp_path / "step_4"
            folder.mkdir()
            coordinator.checkpoint(4, folder)
            coordinator = again(coordinator, tmp_path, 4, folder)
    counts = coordinator.ledger.balance()
    answer_all(coordinator, 5)
    trained.append(train(coordinator, 5))
    assert sorted(sum(trained, [])) == [0, 1, 2, 3, 4, 5]
    assert counts.dropped == 1
    assert coordinator.ledger.counters["dropped_stale"] == 1
    assert coordinator.ledger.balance() == (7, 6, 1, 0, 0, 0, 0, 0)


def test_in_admission_order_a_batch_waits_for_its_slow_group_and_later_ones_do_not_pass_it(tmp_path):
    coordinator = start(tmp_path, recipe(batch=2, group_size=1, eta=1), prompts(8))
    coordinator.version("engine-0", 0, "proven")
    for work in coordinator.work("worker-0", 100):
        if work.task_id != "t000001":
            coordinator.receipts([receipt(work.task_id, 0)])
    reply = coordinator.batch(0)
    assert reply.status == "waiting"
    assert reply.late.startswith("waiting for 1 of 2 groups: oldest t000001 asked ")
    coordinator.receipts([receipt("t000001", 0)])
    assert train(coordinator, 0) == [0, 1]
    coordinator.version("engine-0", 1, "proven")
    assert train(coordinator, 1) == [2, 3]


def test_in_admission_order_a_lost_group_lets_those_behind_it_into_the_batch(tmp_path):
    made = recipe(batch=2, group_size=1, eta=3, epochs=1)
    made.agent.retries = 0
    coordinator = start(tmp_path, made, prompts(3))
    coordinator.version("engine-0", 0, "proven")
    coordinator.work("worker-0", 100)
    coordinator.receipts([receipt("t000001"), receipt("t000002")])
    assert coordinator.batch(0).late.startswith("waiting for 2 of 2 groups: oldest t000000 asked ")
    coordinator.receipts([receipt("t000000", status="engine_error", message="gone")])
    assert train(coordinator, 0) == [1, 2]
    assert coordinator.batch(1).status == "exhausted"


def test_what_was_in_flight_at_a_kill_is_asked_again_under_its_task_id(tmp_path):
    coordinator = start(tmp_path, recipe(batch=2, group_size=2, eta=0), prompts(9))
    coordinator.version("engine-0", 0, "proven")
    work = coordinator.work("worker-0", 3)
    coordinator.receipts([receipt("t000000", 0)])
    assert [(w.task_id, w.samples) for w in work] == [("t000000", [0, 1]), ("t000001", [0])]
    coordinator = again(coordinator, tmp_path, 0, None)
    assert coordinator.ledger.balance().running == 2
    work = coordinator.work("worker-0", 100)
    assert [(w.task_id, w.samples) for w in work] == [("t000000", [1]), ("t000001", [0, 1])]
    assert coordinator.ledger.live["t000000"].samples[1].asked == 2


def test_a_coordinator_restarted_alone_takes_a_receipt_of_before(tmp_path):
    coordinator = start(tmp_path, recipe(batch=1, group_size=2, eta=0), prompts(9))
    coordinator.version("engine-0", 0, "proven")
    coordinator.work("worker-0", 2)
    coordinator.ledger.close()
    coordinator = start(tmp_path, coordinator.recipe, coordinator.prompts)
    assert coordinator.receipts([receipt("t000000", 0), receipt("t000000", 1)]) == 2
    assert coordinator.batch(0).status == "ready"
    assert coordinator.work("worker-0", 4) == []


def test_what_was_trained_after_the_checkpoint_is_planned_again_as_it_was(tmp_path):
    coordinator = start(tmp_path, recipe(batch=2, eta=1), prompts(5))
    coordinator.version("engine-0", 0, "proven")
    folder = tmp_path / "step_2"
    plans = []
    for step in range(5):
        answer_all(coordinator, step)
        plans.append(bytes(coordinator.batch(step).plan))
        train(coordinator, step)
        if step == 1:
            folder.mkdir()
            coordinator.checkpoint(2, folder)
    coordinator = again(coordinator, tmp_path, 2, folder)
    coordinator.resume(2, folder)  # a second time changes nothing
    coordinator.version("engine-0", 2, "proven")
    assert coordinator.ledger.trained_steps == 2
    assert answer_all(coordinator, 2) == []  # what is planned and buffered fills the slots
    assert [bytes(coordinator.batch(step).plan) for step in range(2, 5)] == plans[2:]
    for step in range(2, 5):
        train(coordinator, step)
    answer_all(coordinator, 5)
    assert train(coordinator, 5) == [10, 11]
    assert coordinator.ledger.balance().trained == 12


def test_an_empty_run_folder_takes_the_snapshot(tmp_path):
    old, new, folder = tmp_path / "old", tmp_path / "new", tmp_path / "step_1"
    for path in (old, new, folder):
        path.mkdir()
    coordinator = start(old, recipe(batch=2, eta=2, epochs=1), prompts(12))
    coordinator.version("engine-0", 0, "proven")
    answer_all(coordinator, 0)
    train(coordinator, 0)
    coordinator.checkpoint(1, folder)
    coordinator.ledger.close()
    assert sorted(path.name for path in folder.iterdir()) == ["ledger.sqlite"]
    coordinator = start(new, coordinator.recipe, coordinator.prompts)
    coordinator.resume(1, folder)
    assert coordinator.ledger.balance() == (6, 2, 0, 0, 4, 0, 0, 6)
    coordinator.resume(1, folder)
    coordinator.version("engine-0", 1, "proven")
    assert train(coordinator, 1) == [2, 3]


def test_twelve_steps_and_five_plus_seven_train_the_same_prompts(tmp_path):
    def run(path: Path, stop: int | None) -> list[list[int]]:
        path.mkdir()
        coordinator = start(path, recipe(batch=3, eta=1), prompts(7))
        coordinator.recipe.data.shuffle = True
        coordinator.version("engine-0", 0, "proven")
        trained = []
        for step in range(12):
            if step == stop:
                folder = path / f"step_{step}"
                folder.mkdir()
                coordinator.checkpoint(step, folder)
                coordinator = again(coordinator, path, step, folder)
            answer_all(coordinator, step)
            trained.append(train(coordinator, step))
        return trained

    assert run(tmp_path / "whole", None) == run(tmp_path / "cut", 5)


def test_a_lost_payload_sends_its_sample_back_and_its_plan_is_made_anew(tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "a.spool").write_bytes(b"x" * 20)
    coordinator = start(tmp_path, recipe(batch=1, group_size=2, eta=1), prompts(5))
    coordinator.version("engine-0", 0, "proven")
    for work in coordinator.work("worker-0", 100):
        file = "spool/a.spool" if work.task_id == "t000000" else "spool/b.spool"
        coordinator.receipts([receipt(work.task_id, s, where=Where(file, 10 * s, 10, 0)) for s in work.samples])
    assert plan_of(coordinator, 0) is not None
    coordinator = again(coordinator, tmp_path, 0, None)
    assert prompts_of(plan_of(coordinator, 0)) == [0]
    assert coordinator.ledger.counters["payloads_lost"] == 2
    assert [(w.task_id, w.samples) for w in coordinator.work("worker-0", 9)] == [("t000001", [0, 1])]
    (spool / "a.spool").write_bytes(b"x" * 15)
    coordinator = again(coordinator, tmp_path, 0, None)
    assert plan_of(coordinator, 0) is None
    assert [(w.task_id, w.samples) for w in coordinator.work("worker-0", 9)] == [("t000000", [1]), ("t000001", [0, 1])]


def test_a_call_for_8_then_2_of_10_finished_groups_gives_8_then_2(tmp_path):
    coordinator = start(tmp_path, recipe(batch=8, eta=1, epochs=1, train_remainder=True), prompts(10))
    coordinator.version("engine-0", 0, "proven")
    assert len(answer_all(coordinator, 0)) == 10
    assert train(coordinator, 0) == list(range(8))
    assert train(coordinator, 1) == [8, 9]
    assert coordinator.ledger.balance() == (10, 10, 0, 0, 0, 0, 0, 0)


def test_receipts_sent_twice_or_late_change_nothing(tmp_path):
    made = recipe(batch=1, group_size=2, eta=0)
    made.agent.retries = 1
    coordinator = start(tmp_path, made, prompts(9))
    coordinator.version("engine-0", 0, "proven")
    coordinator.work("worker-0", 2)
    failed = receipt("t000000", 0, status="engine_error", message="reset")
    assert coordinator.receipts([failed]) == 1
    assert coordinator.receipts([failed]) == 0
    coordinator.work("worker-0", 2)
    assert coordinator.receipts([failed]) == 0  # not the second attempt's failure
    good = receipt("t000000", 0)
    assert coordinator.receipts([good, good, receipt("t000000", 1), receipt("t000000", 1)]) == 2
    assert train(coordinator, 0) == [0]
    assert coordinator.receipts([good, receipt("t000404", 0)]) == 0


@pytest.mark.parametrize(
    ("flawed", "message"),
    [
        ({"sampled": {}}, "the policy sampled no token"),
        ({"status": "over_length"}, "no reward was given"),
        ({"status": "agent_error", "message": "KeyError: 'x'"}, "KeyError: 'x'"),
    ],
)
def test_a_receipt_that_cannot_be_an_outcome_is_a_failure_that_says_why(tmp_path, flawed, message):
    coordinator = start(tmp_path, recipe(batch=1, group_size=1, eta=0), prompts(9))
    coordinator.version("engine-0", 0, "proven")
    coordinator.work("worker-0", 1)
    sample = coordinator.ledger.live["t000000"].samples[0]
    coordinator.receipts([receipt("t000000", 0, **flawed)])
    assert [failure.message for failure in sample.failures] == [message]
    assert [w.task_id for w in coordinator.work("worker-0", 1)] == ["t000000"]


def test_a_lease_that_ends_names_the_worker(tmp_path):
    clock = Clock()
    made = recipe(batch=1, group_size=1, eta=0)
    made.agent.retries = 0
    coordinator = start(tmp_path, made, prompts(9), clock, grace=5.0)
    coordinator.version("engine-0", 0, "proven")
    group = coordinator.ledger.live[coordinator.work("worker-3", 1)[0].task_id]
    clock.now += 14.9
    assert not coordinator.expire()
    clock.now += 0.2
    assert coordinator.expire()
    assert group.samples[0].failures == [("lease-1", "timeout", "worker-3 sent no receipt within 15.0 s")]
    assert coordinator.ledger.balance().failed == 1


def test_a_finished_run_hands_out_no_more_work(tmp_path):
    coordinator = start(tmp_path, recipe(batch=2, eta=1, steps=2), prompts(9))
    coordinator.version("engine-0", 0, "proven")
    answered = 0
    for step in range(2):
        answered += len(answer_all(coordinator, step))
        train(coordinator, step)
    assert answer_all(coordinator, 2) == []
    assert answered == 4


def test_one_process_holds_the_file_and_other_prompts_are_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", Stream(4), "a")
    with pytest.raises(LedgerError, match="another coordinator holds it"):
        Ledger(tmp_path / "ledger.sqlite", Stream(4), "a")
    ledger.close()
    with pytest.raises(LedgerError, match="began with other prompts"):
        Ledger(tmp_path / "ledger.sqlite", Stream(4), "b")


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, and long enough to be looked at" * 40)
    with pytest.raises(LedgerError, match="not a ledger that can be written"):
        Ledger(tmp_path / "ledger.sqlite", Stream(4))


def test_a_snapshot_of_another_run_is_refused(tmp_path):
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        coordinator = start(tmp_path / name, recipe(), prompts(5))
        coordinator.version("engine-0", 0, "proven")
        answer_all(coordinator, 0)
        made.append(coordinator)
    (tmp_path / "step_0").mkdir()
    made[0].checkpoint(0, tmp_path / "step_0")
    with pytest.raises(LedgerError, match="is of another run than .*two/ledger.sqlite, which holds 4 groups"):
        made[1].resume(0, tmp_path / "step_0")


def test_a_snapshot_of_other_prompts_is_refused_and_leaves_an_empty_ledger_as_it_is(tmp_path):
    folder = tmp_path / "step_0"
    folder.mkdir()
    other = Ledger(tmp_path / "other.sqlite", Stream(4), "other prompts")
    other.admit(2)
    other.snapshot(folder)
    mine = Ledger(tmp_path / "ledger.sqlite", Stream(4), "prompts")
    with pytest.raises(LedgerError, match="step_0/ledger.sqlite: the run began with other prompts"):
        mine.resume(0, folder)
    mine.close()
    Ledger(tmp_path / "ledger.sqlite", Stream(4), "prompts").close()


def test_a_snapshot_is_found_whatever_its_folder_is_called(tmp_path):
    folder = tmp_path / "50%20 of #1?mode=x"
    folder.mkdir()
    coordinator = start(tmp_path, recipe(batch=2), prompts(9))
    coordinator.version("engine-0", 0, "proven")
    answer_all(coordinator, 0)
    train(coordinator, 0)
    coordinator.checkpoint(1, folder)
    coordinator = again(coordinator, tmp_path, 1, folder)
    assert coordinator.ledger.trained_steps == 1


def checkpointed_run(path: Path, steps: int) -> Coordinator:
    """A run with a checkpoint `step_N` at the start of each step N, and an eval in each."""
    coordinator = start(path, recipe(batch=2, eta=1), prompts(50, held_out=3))
    for step in range(steps):
        (path / f"step_{step}").mkdir()
        coordinator.checkpoint(step, path / f"step_{step}")
        coordinator.version("engine-0", step, "proven")
        coordinator.start_eval("during", step)
        answer_all(coordinator, step)
        train(coordinator, step)
    return coordinator


def stored(coordinator: Coordinator) -> tuple[int, int]:
    """Bytes of the plans, rows of samples."""
    read = coordinator.ledger.store.db.execute
    return (
        read("SELECT sum(length(body)) FROM plans").fetchone()[0],
        read("SELECT count(*) FROM samples").fetchone()[0],
    )


def test_plans_and_receipts_behind_the_checkpoints_do_not_pile_up(tmp_path):
    sizes = []
    for steps in (5, 25):
        (tmp_path / str(steps)).mkdir()
        coordinator = checkpointed_run(tmp_path / str(steps), steps)
        assert coordinator.ledger.balance().trained == 2 * steps
        assert len(coordinator.eval_status("e0001")["metrics"]) == 1
        sizes.append(stored(coordinator))
        with pytest.raises(ProtocolError, match="the plan of step 0 is behind the newest checkpoints"):
            coordinator.batch(0)
    (plans, rows), (more_plans, more_rows) = sizes
    assert more_plans < plans * 1.1
    assert more_rows == rows


@pytest.mark.parametrize("step", [9, 8, 7, 2, 0])
def test_a_resume_works_at_every_checkpoint_although_plans_were_let_go(tmp_path, step):
    coordinator = checkpointed_run(tmp_path, 10)
    planned = {s: bytes(coordinator.batch(s).plan) for s in range(8, 10)}
    coordinator = again(coordinator, tmp_path, step, tmp_path / f"step_{step}")
    coordinator.resume(step, tmp_path / f"step_{step}")
    assert coordinator.ledger.balance().trained == 2 * step
    if step >= 8:  # the newest checkpoint and the one before it find the plans as they were
        assert {s: bytes(coordinator.batch(s).plan) for s in range(step, 10)} == {
            s: planned[s] for s in range(step, 10)
        }
    trained = []
    for now in range(step, 12):
        coordinator.version("engine-0", now, "proven")
        answer_all(coordinator, now)
        trained += train(coordinator, now)
    assert trained == list(range(2 * step, 24))


def test_a_resume_behind_what_was_let_go_needs_the_snapshot(tmp_path):
    coordinator = checkpointed_run(tmp_path, 5)
    with pytest.raises(LedgerError, match="let go of the plans before step 3 and there is no snapshot"):
        coordinator.resume(0, None)


def test_evals_survive_a_restart_and_those_of_rolled_back_versions_do_not(tmp_path):
    coordinator = start(tmp_path, recipe(batch=1, group_size=1, eta=0), prompts(5, held_out=2))
    results = {}
    for step in range(3):
        coordinator.version("engine-0", step, "proven")
        results[step] = coordinator.start_eval("train", step)
        answer_all(coordinator, step)
        train(coordinator, step)
    assert all(coordinator.eval_status(eval_id)["finished"] == 2 for eval_id in results.values())
    coordinator = again(coordinator, tmp_path, 1, None)
    assert coordinator.start_eval("train", 1) == results[1]
    assert coordinator.eval_status(results[1])["done"]
    assert coordinator.start_eval("train", 2) == "e0004"


def test_a_resume_that_cannot_be_is_refused(tmp_path):
    coordinator = start(tmp_path, recipe(), prompts(5))
    with pytest.raises(LedgerError, match="is empty and there is no snapshot"):
        coordinator.resume(3, None)
    coordinator.version("engine-0", 0, "proven")
    answer_all(coordinator, 0)
    train(coordinator, 0)
    with pytest.raises(LedgerError, match="knows plans up to step 0"):
        coordinator.resume(3, None)


def test_the_balance_finds_rows_that_do_not_add_up(tmp_path):
    coordinator = start(tmp_path, recipe(batch=2), prompts(9))
    coordinator.version("engine-0", 0, "proven")
    answer_all(coordinator, 0)
    coordinator.ledger.balance()
    coordinator.ledger.store.db.execute("DELETE FROM groups WHERE task_id = 't000001'")
    with pytest.raises(LedgerError, match="does not balance"):
        coordinator.ledger.balance()


def churn(path: Path) -> None:
    """Writes for ever, with failures, stale groups, evals and checkpoints; prints a line a step."""
    coordinator = start(path, recipe(batch=2, group_size=3, eta=1), prompts(50, held_out=3))
    ledger = coordinator.ledger
    first = step = ledger.trained_steps
    coordinator.resume(step, None)
    rng = random.Random(step)
    while True:
        coordinator.version("engine-0", step, "proven")
        coordinator.start_eval("churn", step)
        while coordinator.batch(step).status == "waiting":
            for work in coordinator.work("worker-0", rng.randrange(1, 9)):
                for sample in work.samples:
                    status = "ok" if rng.random() < 0.8 else "engine_error"
                    sampled = {max(first, step - rng.randrange(4)): 3}
                    coordinator.receipts([receipt(work.task_id, sample, sampled, status=status)])
                    ledger.commit()
            ledger.commit()
        coordinator.trained(step, {})
        ledger.commit()
        step += 1
        folder = path / f"step_{step}"
        folder.mkdir(exist_ok=True)
        coordinator.checkpoint(step, folder)
        print(step, flush=True)


def test_killed_at_any_moment_the_ledger_balances_and_no_step_is_lost(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    rng = random.Random(0)
    told = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        timer = threading.Timer(20, process.kill)
        timer.start()
        told = int(process.stdout.readline())
        time.sleep(rng.uniform(0.05, 0.4))
        process.send_signal(signal.SIGKILL)
        told = int([str(told), *process.stdout.read().split()][-1])
        timer.cancel()
        process.wait(timeout=10)
        process.stdout.close()
        coordinator = start(tmp_path, recipe(batch=2, group_size=3, eta=1), prompts(50, held_out=3))
        assert coordinator.ledger.trained_steps >= told
        balance = coordinator.ledger.balance()
        assert balance.trained == 2 * coordinator.ledger.trained_steps
        back = max(1, told - 1)
        coordinator.resume(back, tmp_path / f"step_{back}")
        assert coordinator.ledger.balance().trained == 2 * back
        coordinator.ledger.close()
    assert told >= 3


if __name__ == "__main__":
    churn(Path(sys.argv[1]))
