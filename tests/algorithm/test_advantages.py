import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from megatron_agentrl.algorithm.advantages import ESTIMATORS, group_advantages, has_signal
from megatron_agentrl.recipe.schema import Advantage

RLOO, GRPO, MEAN = Advantage.rloo, Advantage.grpo, Advantage.mean
KINDS = pytest.mark.parametrize("kind", list(Advantage))


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        (GRPO, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        (RLOO, [1, 0, 0, 0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (MEAN, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        (GRPO, [1, 0, 0, 0, 0], [1.788854, -0.447214, -0.447214, -0.447214, -0.447214]),
        (RLOO, [1, 0, 0, 0, 0], [1.0, -0.25, -0.25, -0.25, -0.25]),
        (MEAN, [1, 0, 0, 0, 0], [0.8, -0.2, -0.2, -0.2, -0.2]),
        (GRPO, [1, 0], [0.707107, -0.707107]),
        (RLOO, [0.3] * 7 + [1.0], [-0.1] * 7 + [0.7]),
    ],
)
def test_estimators_give_the_numbers_of_their_definition(kind, rewards, expected):
    assert group_advantages(kind, rewards) == approx(expected, abs=1e-6)


@KINDS
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 0.7, -2.5, 1e30])
@pytest.mark.parametrize("size", range(1, 11))
def test_equal_rewards_give_exactly_zero(kind, reward, size):
    assert group_advantages(kind, [reward] * size) == [0.0] * size


@KINDS
def test_rewards_that_differ_by_rounding_only_are_equal(kind):
    assert group_advantages(kind, [0.1 + 0.2, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert not has_signal([0.1 + 0.2, 0.3])


@KINDS
def test_a_group_of_one_and_a_lone_survivor_have_no_advantage(kind):
    assert group_advantages(kind, [1.0]) == [0.0]
    assert group_advantages(kind, [None, 1.0, None, None]) == [0.0] * 4
    assert group_advantages(kind, []) == []
    assert group_advantages(kind, [None, None]) == [0.0, 0.0]


def test_statistics_are_those_of_the_members_present():
    assert group_advantages(RLOO, [1, None, 0, None]) == [1.0, 0.0, -1.0, 0.0]


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(kind, bad):
    with pytest.raises(ValueError, match="not all finite"):
        group_advantages(kind, [0.0, bad])


def test_every_estimator_of_the_recipe_is_registered():
    assert set(ESTIMATORS) == set(Advantage)


rewards_of_a_group = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12)


@KINDS
@given(rewards=rewards_of_a_group, data=st.data())
@settings(deadline=None)
def test_permuting_the_members_permutes_the_advantages(kind, rewards, data):
    order = data.draw(st.permutations(range(len(rewards))))
    expected = group_advantages(kind, rewards)
    assert group_advantages(kind, [rewards[i] for i in order]) == approx([expected[i] for i in order], abs=1e-9)


@KINDS
@given(rewards=st.lists(st.integers(-8, 8), min_size=2, max_size=12), shift=st.integers(-100, 100))
@settings(deadline=None)
def test_a_constant_added_to_all_rewards_changes_nothing(kind, rewards, shift):
    shifted = group_advantages(kind, [reward + shift for reward in rewards])
    assert shifted == approx(group_advantages(kind, rewards), abs=1e-9)


@KINDS
@given(rewards=rewards_of_a_group)
@settings(deadline=None)
def test_advantages_of_a_group_sum_to_zero_and_stay_bounded(kind, rewards):
    found = group_advantages(kind, rewards)
    bound = math.sqrt(len(rewards)) if kind is GRPO else 2 * (max(rewards) - min(rewards))
    assert abs(sum(found)) <= 1e-9 * max(1, bound) * len(found)
    assert max(map(abs, found)) <= bound + 1e-9


@given(rewards=st.lists(st.integers(-8, 8), min_size=2, max_size=12), scale=st.floats(1e-150, 1e150))
@settings(deadline=None)
def test_the_scaled_estimator_does_not_see_the_unit_of_the_reward(rewards, scale):
    assert group_advantages(GRPO, [reward * scale for reward in rewards]) == approx(
        group_advantages(GRPO, rewards), abs=1e-9
    )
