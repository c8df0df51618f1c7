from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_agentrl.data.stream import Stream, permutation


@given(size=st.integers(1, 30), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_epoch_holds_each_prompt_once(size, seed, epoch):
    stream = Stream(size, seed)
    found = [stream.at(position) for position in range(epoch * size, (epoch + 1) * size)]
    assert [place.epoch for place in found] == [epoch] * size
    assert sorted(place.prompt for place in found) == list(range(size))


def test_the_order_is_a_function_of_seed_and_epoch():
    assert permutation(8, 0, 0) == (0, 3, 7, 4, 1, 5, 2, 6)
    assert len({permutation(8, seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    forwards = [Stream(5, 3).at(position) for position in range(20)]
    assert [Stream(5, 3).at(position) for position in reversed(range(20))] == forwards[::-1]


def test_without_shuffle_the_file_order_repeats():
    stream = Stream(3, shuffle=False)
    assert [stream.at(position).prompt for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_end_the_stream():
    stream = Stream(3, epochs=2)
    assert stream.total == 6
    assert stream.at(5).epoch == 1
    with pytest.raises(IndexError):
        stream.at(6)
    assert Stream(3).total is None


def test_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match="at least 1 prompt"):
        Stream(0)
