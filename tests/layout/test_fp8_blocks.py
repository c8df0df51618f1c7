"""FP8 source weights: which scale belongs to which block, and what comes out of reading any rectangle. Case C05."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_agentrl.layout.boxes import LayoutError
from megatron_agentrl.layout.fp8 import blocks, scale_shape, scales_of
from megatron_agentrl.recipe.weight_files import WeightsError
from megatron_agentrl.trainer.hf_folder import Checkpoint, dequantise

NAME = "model.layers.0.self_attn.o_proj.weight"


def test_blocks_begin_at_the_whole_tensors_first_row_and_column():
    assert scale_shape((100, 300)) == (1, 3)  # joining the scales of two halves of 150 columns would give 4
    assert [blocks(*span) for span in ((0, 150), (150, 300), (128, 256), (127, 129))] == [
        (0, 2),
        (1, 3),
        (1, 2),
        (0, 2),
    ]
    with pytest.raises(LayoutError, match="only matrices have"):
        scale_shape((100,))


def c05(folder):
    """100 x 300, all 1.0 but columns 128 to 149, which are 100; scales are a block's largest / 448."""
    weight = torch.ones(100, 300)
    weight[:, 128:150] = 100
    scales = torch.tensor([[1 / 448, 100 / 448, 1 / 448]])
    codes = (weight / scales.repeat_interleave(128, 1)[:, :300]).to(torch.float8_e4m3fn)
    save_file({NAME: codes, NAME + "_scale_inv": scales}, folder / "model.safetensors")


def test_half_of_the_columns_is_read_with_the_scales_of_the_whole_weights_blocks(tmp_path):
    c05(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.shapes() == {NAME: (100, 300)}  # the scales are no tensor of the model
        left, right = checkpoint.read(NAME, 0, 100, 0, 150), checkpoint.read(NAME, 0, 100, 150, 300)
        whole = checkpoint.tensor(NAME)
    assert whole.dtype == torch.float32 and torch.cat([left, right], 1).equal(whole)
    assert whole[:, :128].unique().tolist() == pytest.approx([1.0], rel=1e-7)
    assert whole[:, 128:150].unique().tolist() == pytest.approx([100.0], rel=1e-7)
    # 1 / (100 / 448) = 4.48 is coded as 4.5; with the wrong block's scale these columns would read 0.01004
    assert right[:, :106].unique().tolist() == pytest.approx([4.5 * 100 / 448], rel=1e-7)
    assert right[0, 0].item() == pytest.approx(1.00446, abs=1e-5)
    assert right[:, 106:].unique().tolist() == pytest.approx([1.0], rel=1e-7)


def test_a_code_times_its_scale_rounds_once():
    codes = torch.tensor([[1.125, -448.0, 0.001953125]]).to(torch.float8_e4m3fn)  # the last is the smallest code
    found = dequantise(codes, torch.tensor([[0.3]]))
    assert found.equal(torch.tensor([[1.125, -448.0, 0.001953125]]) * torch.tensor(0.3))
    assert found.bfloat16().tolist() == [[0.337890625, -134.0, 0.00058746337890625]]  # of 0.3375, -134.4, 0.000585938


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_rectangle_is_that_part_of_the_whole(data):
    rows, cols = data.draw(st.integers(1, 290)), data.draw(st.integers(1, 290))
    r0, c0 = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    r1, c1 = data.draw(st.integers(r0 + 1, rows)), data.draw(st.integers(c0 + 1, cols))
    codes = torch.arange(rows * cols).remainder(17).sub(8).view(rows, cols).to(torch.float8_e4m3fn)
    scales = torch.arange(1, 1 + torch.Size(scale_shape((rows, cols))).numel()).float().view(scale_shape((rows, cols)))
    (b0, b1), (d0, d1) = blocks(r0, r1), blocks(c0, c1)
    part = dequantise(codes[r0:r1, c0:c1], scales[b0:b1, d0:d1], r0 - 128 * b0, c0 - 128 * d0)
    assert part.equal(dequantise(codes, scales)[r0:r1, c0:c1])


@pytest.mark.parametrize(
    ("shapes", "stored", "message"),
    [
        ({NAME: (8, 8)}, {NAME: "F8_E4M3"}, "is F8_E4M3 without .*o_proj.weight_scale_inv"),
        (
            {NAME: (8, 200), NAME + "_scale_inv": (1, 3)}, {NAME: "F8_E4M3", NAME + "_scale_inv": "F32"},
            r"is F32 \(1, 3\), expected F32 \(1, 2\) for a weight of \(8, 200\)",
        ),
        (
            {NAME: (8, 8), NAME + "_scale_inv": (1, 1)}, {NAME: "BF16", NAME + "_scale_inv": "F32"},
            "scales .*o_proj.weight, which is BF16, expected F8_E4M3",
        ),
        ({NAME + "_scale_inv": (1, 1)}, {NAME + "_scale_inv": "F32"}, "which is not there"),
    ],
)  # fmt: skip
def test_codes_and_scales_that_do_not_belong_together_are_refused_by_name(shapes, stored, message):
    with pytest.raises(LayoutError, match=message):
        scales_of(shapes, stored)


def test_a_folder_whose_scales_are_missing_is_refused_before_a_weight_is_read(tmp_path):
    save_file({NAME: torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="o_proj.weight is F8_E4M3 without"):
        Checkpoint(tmp_path)
