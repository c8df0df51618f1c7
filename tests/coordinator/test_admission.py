from __future__ import annotations

import random
from pathlib import Path

import pytest
from coordinator_fakes import plan_of, prompts, receipt, recipe, start

from megatron_agentrl.coordinator.admission import free_slots


@pytest.mark.parametrize(
    ("version", "eta", "accepted", "running", "free"),
    [(0, 0, 0, 0, 4), (0, 2, 0, 0, 12), (3, 1, 14, 3, 3), (0, 1, 6, 2, 0), (0, 0, 3, 4, 0)],
)
def test_free_slots_count_accepted_and_running_as_one_number(version, eta, accepted, running, free):
    assert free_slots(version, eta, 4, accepted, running) == free


def test_most_admissions_by_version_with_eta_1():
    assert [free_slots(version, 1, 4, 0, 0) for version in range(4)] == [8, 12, 16, 20]


def test_no_engine_serves_no_slots():
    assert free_slots(None, 2, 4, 0, 0) == 0


def test_nothing_is_admitted_beyond_the_last_step():
    assert free_slots(3, 2, 4, accepted=10, running=4, total=16) == 2


def run_schedule(path: Path, seed: int, eta: int, batch: int, steps: int, haste: float) -> tuple[list[int], int, int]:
    """A fake engine and trainer in random order; `haste` is how likely the producer moves rather than the trainer.

    Returns per step the largest staleness trained, and the most groups that were accepted and running at once beyond
    the bound (0 if never), and the samples trained. Every sample is asked at one version and answered at another.
    """
    rng = random.Random(seed)
    coordinator = start(path, recipe(batch, 2, eta, steps), prompts(7))
    ledger = coordinator.ledger
    version, step = 0, 0
    coordinator.version("engine-0", 0, "proven")
    open_samples: list[tuple[str, int, int]] = []
    oldest: list[int] = []
    beyond = trained = 0
    publish_pending = False
    for _ in range(20000):
        if step == steps:
            break
        if rng.random() < haste:
            if open_samples and rng.random() < 0.6:
                task_id, sample, asked_at = open_samples.pop(rng.randrange(len(open_samples)))
                if rng.random() < 0.05:
                    coordinator.receipts([receipt(task_id, sample, status="engine_error", message="reset")])
                else:
                    sampled = {v: 1 + rng.randrange(3) for v in range(asked_at, version + 1)}
                    coordinator.receipts([receipt(task_id, sample, sampled)])
            else:
                for work in coordinator.work("worker-0", rng.randrange(1, 6)):
                    open_samples += [(work.task_id, sample, version) for sample in work.samples]
                under_way = ledger.trained + ledger.buffered + ledger.running
                beyond = max(beyond, under_way - (version + eta + 1) * batch)
        elif publish_pending:
            version, publish_pending = version + 1, False
            coordinator.version("engine-0", version, "proven")
        elif (plan := plan_of(coordinator, step)) is not None:
            assert len(plan.groups) == batch
            ages = [
                step - token_version
                for rank in plan.ranks
                for micro_batch in rank
                for row in micro_batch
                for token_version in row.receipt.sampled
                if 0 <= step - token_version <= eta
            ]
            oldest.append(max([int(plan.stats["staleness_max"]), *ages]))
            trained += sum(len(group.rewards) for group in plan.groups)
            coordinator.trained(step, {})
            step, publish_pending = step + 1, True
    assert step == steps, f"no progress after step {step}: {coordinator.batch(step).late}"
    ledger.balance()
    ledger.close()
    return oldest, beyond, trained


def test_staleness_over_random_schedules_stays_within_eta(tmp_path):
    reached = dict.fromkeys((0, 1, 2, 3), 0)
    for seed in range(60):
        eta = seed % 4
        folder = tmp_path / str(seed)
        folder.mkdir()
        oldest, beyond, _ = run_schedule(folder, seed, eta, batch=4, steps=6, haste=(0.5, 0.9, 0.97)[seed % 3])
        assert beyond <= 0
        assert max(oldest) <= eta
        reached[eta] = max(reached[eta], max(oldest))
    assert reached == {0: 0, 1: 1, 2: 2, 3: 3}


def test_eta_0_is_synchronous_and_does_not_hang(tmp_path):
    oldest, _, trained = run_schedule(tmp_path, seed=1, eta=0, batch=4, steps=3, haste=0.9)
    assert oldest == [0, 0, 0]
    assert trained >= 12  # 4 groups a step; each has both samples unless retries ran out


def test_failed_and_dropped_groups_give_their_slot_back(tmp_path):
    made = recipe(batch=4, group_size=1, eta=0)
    made.agent.retries = 0
    coordinator = start(tmp_path, made, prompts(100))
    coordinator.version("engine-0", 0, "proven")
    first = coordinator.work("worker-0", 100)
    assert [work.task_id for work in first] == ["t000000", "t000001", "t000002", "t000003"]
    assert coordinator.slots == 0
    coordinator.receipts([receipt("t000002", status="engine_error", message="reset")])
    assert coordinator.slots == 1
    assert [work.task_id for work in coordinator.work("worker-0", 100)] == ["t000004"]
    assert coordinator.ledger.balance()[:6] == (5, 0, 0, 1, 0, 4)
