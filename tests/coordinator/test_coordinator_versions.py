from __future__ import annotations

from coordinator_fakes import answer_all, plan_of, prompts, receipt, recipe, start

from megatron_agentrl.coordinator.versions import Versions


def test_the_oldest_serving_engine_counts():
    versions = Versions([("a", 3, "proven"), ("b", 4, "proven")])
    assert versions.oldest_serving() == 3
    versions.report("a", 4, "published")
    assert versions.oldest_serving() == 3
    versions.report("a", 4, "failed")
    assert versions.engines() == {"a": None, "b": 4}
    assert versions.oldest_serving() == 4
    assert versions.describe() == "a not serving (version 4 failed), b proven version 4"


def test_no_report_no_version():
    assert Versions().oldest_serving() is None
    assert Versions([("a", 0, "published")]).oldest_serving() is None


def test_a_version_is_judged_for_its_own_engine():
    versions = Versions([("a", 0, "proven"), ("b", 0, "proven"), ("a", 1, "proven"), ("b", 1, "published")])
    assert versions.judge("a", [0, 1]) == "proven"
    assert versions.judge("b", [0, 1]) == "held"
    versions.report("b", 1, "failed")
    assert versions.judge("b", [0, 1]) == "void"
    assert versions.judge("b", []) == "proven"
    assert versions.judge("stranger", [0]) == "held"


def test_receipts_wait_for_the_proof_and_are_released(tmp_path):
    coordinator = start(tmp_path, recipe(batch=1, group_size=2), prompts(4))
    coordinator.version("engine-0", 0, "proven")
    answer_all(coordinator, version=1, room=2)
    assert coordinator.batch(0).status == "waiting"
    assert "held until engine-0 proves version 1, 2 samples open" in coordinator.batch(0).late
    coordinator.version("engine-0", 1, "published")
    assert coordinator.batch(0).status == "waiting"
    coordinator.version("engine-0", 1, "proven")
    assert len(coordinator.ledger.complete_groups()) == 1
    coordinator.ledger.balance()


def test_receipts_of_a_failed_version_are_void_and_their_samples_asked_again(tmp_path):
    made = recipe(batch=1, group_size=2)
    made.agent.retries = 0  # a void receipt is not the sample's failure
    coordinator = start(tmp_path, made, prompts(4))
    coordinator.version("engine-0", 0, "proven")
    coordinator.version("engine-1", 0, "proven")
    work = coordinator.work("worker-0", 2)
    coordinator.receipts([receipt("t000000", 0, {0: 2, 1: 2}), receipt("t000000", 1, {0: 2, 1: 2}, engine="engine-1")])
    coordinator.version("engine-1", 1, "proven")
    coordinator.version("engine-0", 1, "failed")
    again = coordinator.work("worker-0", 1)
    assert [(w.task_id, w.samples) for w in work] == [("t000000", [0, 1])]
    assert [(w.task_id, w.samples) for w in again] == [("t000000", [0])]
    coordinator.receipts([receipt("t000000", 0, {1: 2})])  # arrives after the failure was reported
    assert [(w.task_id, w.samples) for w in coordinator.work("worker-0", 1)] == [("t000000", [0])]
    coordinator.receipts([receipt("t000000", 0, {0: 2})])
    assert coordinator.batch(0).status == "ready"


def test_a_trajectory_of_several_engines_waits_for_them_and_is_released(tmp_path):
    made = start(tmp_path, recipe(batch=1, group_size=2, eta=1), prompts(4))
    made.version("engine-0", 0, "proven")
    made.version("engine-1", 0, "proven")
    (work,) = made.work("worker-0", 2)
    made.receipts([receipt(work.task_id, 0, {0: 4}, engine="engine-0,engine-1")])
    made.receipts([receipt(work.task_id, 1, {0: 2, 1: 2}, engine="engine-1,engine-0")])
    assert plan_of(made, 0) is None
    made.version("engine-0", 1, "proven")
    assert plan_of(made, 0).tokens == 6


def test_a_version_that_failed_on_one_engine_of_several_is_void():
    versions = Versions([("engine-0", 1, "proven"), ("engine-1", 1, "failed"), ("engine-1", 0, "proven")])
    assert versions.judge("engine-0,engine-1", [1]) == "void"
    assert versions.judge("engine-0,engine-1", [0, 1]) == "void"
    assert versions.judge("engine-0,engine-2", [1]) == "proven"
    assert versions.judge("engine-0,engine-2", [2]) == "held"
