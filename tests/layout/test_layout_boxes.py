import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_agentrl.layout.boxes import (
    Box,
    LayoutError,
    Overlap,
    Padding,
    ParameterLayout,
    check_cover,
    check_tiling,
    intersect,
    matrix_shape,
)


def test_a_tensor_of_any_rank_is_a_matrix():
    assert matrix_shape(()) == (1, 1)
    assert matrix_shape((7,)) == (7, 1)
    assert matrix_shape((7, 3)) == (7, 3)
    assert matrix_shape((7, 1, 4)) == (7, 4)


def test_intersection_gives_the_shared_rectangle_and_its_place_on_both_sides():
    source = Box("w", 2, 6, 0, 8, row=10, col=0)
    target = Box("w", 4, 9, 3, 5, row=0, col=1)
    assert intersect(source, target) == Overlap(
        "w", 4, 6, 3, 5, source_row=12, source_col=3, target_row=0, target_col=1
    )


def test_boxes_of_other_tensors_or_that_only_touch_do_not_intersect():
    assert intersect(Box("w", 0, 2, 0, 2, 0, 0), Box("v", 0, 2, 0, 2, 0, 0)) is None
    assert intersect(Box("w", 0, 2, 0, 2, 0, 0), Box("w", 2, 4, 0, 2, 0, 0)) is None


def test_padding_counts_as_covered():
    check_tiling(ParameterLayout("p", (4, 3), (Box("w", 0, 3, 0, 3, 0, 0),), (Padding(3, 0, 1, 3),)))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ((Box("w", 0, 3, 0, 3, 0, 0),), "9 of 12 elements"),
        ((Box("w", 0, 3, 0, 3, 0, 0), Box("w", 5, 7, 0, 3, 2, 0)), "overlap"),
        ((Box("w", 0, 5, 0, 3, 0, 0),), "outside 4 x 3"),
        ((Box("w", 1, 1, 0, 3, 0, 0),), "empty or outside"),
    ],
)
def test_a_gap_an_overlap_and_an_overrun_are_refused_by_name(boxes, message):
    with pytest.raises(LayoutError, match=message) as error:
        check_tiling(ParameterLayout("decoder.x.weight", (4, 3), boxes))
    assert "decoder.x.weight" in str(error.value)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_grid_of_boxes_covers_and_any_missing_cell_is_seen(heights, widths):
    boxes = []
    for i, h in enumerate(heights):
        for j, w in enumerate(widths):
            r, c = sum(heights[:i]), sum(widths[:j])
            boxes.append(Box("w", r, r + h, c, c + w, r, c))
    shape = (sum(heights), sum(widths))
    check_tiling(ParameterLayout("p", shape, tuple(boxes)))
    check_cover("w", shape, boxes)
    with pytest.raises(LayoutError):
        check_cover("w", shape, boxes[1:])
