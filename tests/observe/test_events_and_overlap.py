"""Event logs and interval arithmetic."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_agentrl.observe.events import EventLog, read_events
from megatron_agentrl.observe.overlap import intersection, length, overlap, union

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def points(pairs):
    """The unit cells that a list of integer intervals covers."""
    return {cell for start, stop in pairs for cell in range(start, stop)}


def test_spans_and_points_are_recorded_with_their_fields(tmp_path):
    log = EventLog(tmp_path, "trainer-0")
    with log.span("train", step=3) as fields:
        fields["tokens"] = 7
    log.point("proven", version=4)
    log.record("wait", 1.0, 2.5)
    span, point, wait = read_events(tmp_path)["trainer-0"]
    assert (span["name"], span["step"], span["tokens"]) == ("train", 3, 7)
    assert span["start"] <= span["stop"] <= point["time"]
    assert (point["name"], point["version"]) == ("proven", 4)
    assert wait == {"name": "wait", "start": 1.0, "stop": 2.5}


def test_a_span_that_fails_is_recorded_and_fails(tmp_path):
    log = EventLog(tmp_path, "trainer-0")
    with pytest.raises(KeyError), log.span("train"):
        raise KeyError("x")
    assert read_events(tmp_path)["trainer-0"][0]["error"] == "KeyError"


def test_a_restarted_process_goes_on_in_its_file_and_a_torn_line_is_left_out(tmp_path):
    for _ in range(2):
        log = EventLog(tmp_path, "engine-1")
        log.point("up")
        log.close()
    with log.path.open("a") as file:
        file.write(json.dumps({"name": "torn"})[:5])
    assert [event["name"] for event in read_events(tmp_path)["engine-1"]] == ["up", "up"]
    EventLog(tmp_path, "engine-1").point("again")
    assert [event["name"] for event in read_events(tmp_path)["engine-1"]] == ["up", "up", "again"]


def test_overlap_of_known_intervals():
    training = [(0.0, 10.0), (20.0, 30.0)]
    sampling = [(5.0, 8.0), (7.0, 25.0)]
    assert union(sampling) == [(5.0, 25.0)]
    assert intersection(training, sampling) == [(5.0, 10.0), (20.0, 25.0)]
    assert overlap(training, sampling) == 0.5
    assert overlap([], sampling) == 0.0
    assert overlap(training, []) == 0.0


@given(intervals, intervals)
def test_intervals_agree_with_counting_cells(a, b):
    assert length(a) == len(points(a))
    assert sum(stop - start for start, stop in intersection(a, b)) == len(points(a) & points(b))
    if points(a):
        assert overlap(a, b) == len(points(a) & points(b)) / len(points(a))
