from __future__ import annotations

import pytest
from coordinator_fakes import receipt
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agentrl.coordinator.batch_plan import (
    Candidate,
    Plan,
    Shape,
    plan_batch,
    select,
    staleness,
    trainable_tokens,
)
from megatron_agentrl.data.packing import Multiples


def group(order: int, *receipts) -> Candidate:
    return Candidate(order, f"t{order:06d}", receipts)


def rows(plan: Plan):
    return [row for rank in plan.ranks for micro_batch in rank for row in micro_batch]


def named(plan: Plan) -> list[tuple[str, int]]:
    return sorted((row.receipt.task_id, row.receipt.sample) for row in rows(plan))


def padded(micro_batch, packing: Multiples | None = None) -> int:
    lengths = [length for row in micro_batch for length in row.receipt.lengths]
    if packing is not None:
        return packing.positions(lengths)
    return len(lengths) * max(lengths, default=0)


def test_an_action_over_two_versions_has_a_staleness_per_token():
    ages = staleness({7: 3, 8: 5}, step=9)
    assert ages == {2: 3, 1: 5}
    assert sum(age * count for age, count in ages.items()) / 8 == 1.375
    plan = plan_batch([group(0, receipt("t000000", 0, {7: 3, 8: 5}))], 9, eta=2, shape=Shape(1, 100))
    assert plan.stats["staleness_mean"] == 1.375
    assert plan.stats["staleness_max"] == 2


def test_what_agents_report_is_averaged_over_the_runs_that_report_it():
    members = [receipt("t000000", 0, {9: 2}, format=1.0, turns=3.0), receipt("t000000", 1, {9: 2}, format=0.0)]
    plan = plan_batch([group(0, *members)], 9, eta=1, shape=Shape(1, 100))
    assert {name: value for name, value in plan.stats.items() if name.startswith("agent/")} == {
        "agent/format": 0.5,
        "agent/turns": 3.0,
    }


@pytest.mark.parametrize(
    ("sampled", "step", "eta", "tokens"),
    [
        ({7: 6, 8: 4}, 9, 1, 4),
        ({7: 6, 8: 4}, 9, 2, 10),
        ({3: 3, 5: 1, 6: 6}, 6, 2, 7),
        ({3: 4}, 5, 2, 4),
        ({3: 4}, 6, 2, 0),
        ({3: 4}, 2, 2, 0),
    ],
)
def test_tokens_that_are_too_old_or_not_yet_due_are_masked(sampled, step, eta, tokens):
    assert trainable_tokens(sampled, step, eta) == tokens


def test_oldest_groups_first_and_stale_ones_out():
    candidates = [group(order, receipt(f"t{order:06d}", 0, {order: 1})) for order in (5, 3, 4, 6, 1)]
    selection = select(candidates, step=6, eta=3, batch=2)
    assert [candidate.order for candidate in selection.chosen] == [3, 4]
    assert selection.stale == ["t000001"]


def test_a_group_with_one_trainable_trajectory_stays_and_masks_the_rest():
    old, new = receipt("t000000", 0, {0: 4}, reward=1.0), receipt("t000000", 1, {2: 4}, reward=0.0)
    selection = select([group(0, old, new)], step=2, eta=1, batch=1)
    plan = plan_batch(selection.chosen, 2, 1, Shape(1, 100))
    assert plan.groups[0].rewards == [1.0, 0.0]
    assert named(plan) == [("t000000", 1)]
    assert (plan.tokens, plan.skipped, plan.stats["masked_tokens"]) == (4, 1, 4)


def test_rows_of_equal_rewards_are_skipped_but_their_tokens_count():
    flat = group(0, receipt("t000000", 0, reward=1.0), receipt("t000000", 1, reward=1.0))
    mixed = group(1, receipt("t000001", 0, reward=1.0), receipt("t000001", 1, reward=0.0))
    plan = plan_batch([flat, mixed], 0, 0, Shape(1, 100))
    assert named(plan) == [("t000001", 0), ("t000001", 1)]
    assert (plan.tokens, plan.skipped) == (16, 2)
    kept = plan_batch([flat, mixed], 0, 0, Shape(1, 100), keep_equal=True)
    assert (len(rows(kept)), kept.skipped) == (4, 0)


def test_no_row_with_signal_still_gives_every_rank_a_micro_batch():
    plan = plan_batch([group(0, receipt("t000000", 0, reward=1.0))], 0, 0, Shape(3, 100))
    assert plan.ranks == [[[]], [[]], [[]]]
    assert (plan.tokens, plan.skipped, plan.padding) == (4, 1, 0.0)


def test_24_rows_become_17_over_4_ranks_and_5_over_4_and_none_is_lost():
    groups = [group(g, *(receipt(f"t{g:06d}", s, {0: 1 + g + s}, reward=float(s)) for s in range(4))) for g in range(6)]
    assert len(rows(plan_batch(groups, 0, 0, Shape(4, 64)))) == 24
    survivors = [*groups[:4], Candidate(4, "t000004", groups[4].receipts[:1])]
    plan = plan_batch(survivors, 0, 0, Shape(4, 64), keep_equal=True)
    assert named(plan) == sorted((r.task_id, r.sample) for g in survivors for r in g.receipts)
    assert len(rows(plan)) == 17
    assert len({len(rank) for rank in plan.ranks}) == 1
    five = plan_batch([groups[0], Candidate(1, "t000001", groups[1].receipts[:1])], 0, 0, Shape(4, 64), True)
    assert sorted(sum(len(micro_batch) for micro_batch in rank) for rank in five.ranks) == [1, 1, 1, 2]


def test_a_rank_with_fewer_micro_batches_gets_empty_ones():
    lengths = [60, 60, 60]
    made = [receipt("t000000", i, reward=float(i), lengths=[length]) for i, length in enumerate(lengths)]
    plan = plan_batch([group(0, *made)], 0, 0, Shape(2, 64))
    assert [[len(micro_batch) for micro_batch in rank] for rank in plan.ranks] == [[1, 1], [1, 0]]
    assert plan.padding == 0.0


def test_padding_is_the_empty_share_of_the_padded_tokens():
    made = [receipt("t000000", i, reward=float(i), lengths=[length]) for i, length in enumerate((30, 10))]
    plan = plan_batch([group(0, *made)], 0, 0, Shape(1, 64))
    assert plan.ranks[0][0][0].receipt.lengths == [30]
    assert plan.padding == pytest.approx(20 / 60)


def test_packed_rows_share_a_micro_batch_by_what_they_hold():
    lengths = [[33], [17], [9, 9], [25]]  # 32, 16, 8 + 8 and 24 input positions
    made = [receipt("t000000", i, reward=float(i), lengths=held) for i, held in enumerate(lengths)]
    padded, packed = (
        plan_batch([group(0, *made)], 0, 0, Shape(1, 48, packing=packing)) for packing in (None, Multiples())
    )
    assert [[row.member for row in part] for part in padded.ranks[0]] == [[0], [3], [2], [1]]
    assert [[row.member for row in part] for part in packed.ranks[0]] == [[0, 1], [3, 2]]
    assert packed.padding == 0.0
    cut = plan_batch(
        [group(0, receipt("t000000", 0, lengths=[6, 3]))], 0, 0, Shape(1, 48, packing=Multiples(4, 8)), True
    )
    assert cut.padding == pytest.approx(9 / 16)  # 5 and 2 positions in 8 and 4, and 16 in all


def test_an_interleaved_pipeline_gets_a_multiple_of_its_stages():
    made = [receipt("t000000", i, reward=float(i), lengths=[60]) for i in range(3)]
    plan = plan_batch([group(0, *made)], 0, 0, Shape(1, 64, multiple=2))
    assert [len(micro_batch) for micro_batch in plan.ranks[0]] == [1, 1, 1, 0]


def test_cost_is_even_over_ranks():
    made = [receipt("t000000", i, reward=float(i), lengths=[100 - i]) for i in range(32)]
    plan = plan_batch([group(0, *made)], 0, 0, Shape(4, 400))
    load = [sum(sum(row.receipt.lengths) for micro_batch in rank for row in micro_batch) for rank in plan.ranks]
    assert max(load) - min(load) <= 4


def test_a_row_without_reward_is_refused():
    failed = receipt("t000000", 0, status="timeout")
    with pytest.raises(ValueError, match="t000000/0 has no reward"):
        plan_batch([group(0, failed)], 0, 0, Shape(1, 64))


_receipts = st.lists(
    st.tuples(
        st.lists(st.integers(1, 40), min_size=1, max_size=3),
        st.dictionaries(st.integers(0, 4), st.integers(1, 9), max_size=3),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(
    groups=st.lists(_receipts, min_size=1, max_size=6),
    ranks=st.integers(1, 5),
    bound=st.integers(40, 200),
    multiple=st.integers(1, 3),
    keep_equal=st.booleans(),
    packing=st.sampled_from([None, Multiples(), Multiples(4, 8)]),
    data=st.data(),
)
def test_laws_of_a_plan(groups, ranks, bound, multiple, keep_equal, packing, data):
    made = [
        group(
            order,
            *(
                receipt(f"t{order:06d}", sample, sampled, reward, lengths=lengths)
                for sample, (lengths, sampled, reward) in enumerate(members)
            ),
        )
        for order, members in enumerate(groups)
    ]
    shape = Shape(ranks, bound, multiple, packing)
    plan = plan_batch(made, 4, 2, shape, keep_equal)

    wanted = sorted(
        (r.task_id, r.sample)
        for g in made
        for r in g.receipts
        if trainable_tokens(r.sampled, 4, 2) and (keep_equal or len({m.reward for m in g.receipts}) > 1)
    )
    assert named(plan) == wanted  # each row that counts, exactly once
    assert plan.skipped == sum(len(g.receipts) for g in made) - len(wanted)
    assert len(plan.ranks) == ranks
    assert len({len(rank) for rank in plan.ranks}) == 1  # the same number of micro-batches on each rank
    assert len(plan.ranks[0]) % multiple == 0
    assert all(len(mb) <= 1 or padded(mb, packing) <= bound for rank in plan.ranks for mb in rank)
    assert all(plan.groups[row.group].rewards[row.member] == row.receipt.reward for row in rows(plan))
    assert plan.tokens == sum(trainable_tokens(r.sampled, 4, 2) for g in made for r in g.receipts)
    assert 0.0 <= plan.padding < 1.0

    shuffled = [Candidate(g.order, g.task_id, data.draw(st.permutations(list(g.receipts)))) for g in made]
    assert plan_batch(data.draw(st.permutations(shuffled)), 4, 2, shape, keep_equal) == plan
