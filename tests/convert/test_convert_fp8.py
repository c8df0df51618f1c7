"""FP8 in blocks of 128 x 128: literal scales and codes, which tensors, what config.json says, and reading it back."""

from __future__ import annotations

import json

import pytest
import torch
from convert_tools import tensors
from safetensors.torch import save_file

from megatron_agentrl.convert import cli, fp8
from megatron_agentrl.convert.to_hf import megatron_to_hf
from megatron_agentrl.convert.to_megatron import Cut, hf_to_megatron


def columns_of_a_hundred():
    """C05: 100 x 300, all 1 but columns 128 to 149, which are 100."""
    weight = torch.ones(100, 300)
    weight[:, 128:150] = 100.0
    return weight


def test_scales_and_codes_are_those_of_the_whole_weight():
    codes, scales = fp8.quantise(columns_of_a_hundred())
    assert scales.shape == (1, 3) and codes.shape == (100, 300) and codes.dtype == torch.float8_e4m3fn
    assert torch.equal(scales[0], torch.tensor([1.0, 100.0, 1.0]) / 448)
    back = fp8.dequantise(codes, scales, torch.float32)
    assert back[0, [0, 127, 128, 149, 256, 299]].tolist() == pytest.approx([1, 1, 100, 100, 1, 1], rel=1e-6)
    # 1 / (100 / 448) = 4.48 is coded as 4.5
    assert codes[0, 150].float() == 4.5 and back[0, [150, 255]].tolist() == pytest.approx([1.00446, 1.00446], rel=1e-5)


def test_zeros_have_scale_one_and_rows_can_be_read_from_the_middle():
    weight = torch.zeros(300, 130)
    weight[140] = torch.linspace(-3, 3, 130)
    codes, scales = fp8.quantise(weight)
    assert scales[0].tolist() == [1.0, 1.0] and scales[1, 0] == 3.0 / 448
    whole = fp8.dequantise(codes, scales, torch.bfloat16)
    assert torch.equal(fp8.dequantise(codes[120:290], scales, torch.bfloat16, first_row=120), whole[120:290])


@pytest.fixture(scope="module")
def blockwise(tiny, tmp_path_factory):
    """A tiny DeepSeek-V3 through a cut whose borders are no multiple of 128, as FP8."""
    folder = tmp_path_factory.mktemp("fp8")
    hf_to_megatron(tiny("deepseek_v3"), folder / "m", Cut(tp=2, ep=3, etp=2), quiet=True)
    megatron_to_hf(folder / "m", folder / "hf", blockwise=True, quiet=True)
    return folder / "hf"


def test_the_linears_of_deepseeks_convention_are_quantised_from_the_whole_weight(tiny, blockwise):
    before, after = tensors(tiny("deepseek_v3")), tensors(blockwise)
    codes = {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    assert set(after) == set(before) | {name + "_scale_inv" for name in codes}
    kinds = {name.split(".")[-2] for name in codes}
    assert kinds == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for name in before:
        if name in codes:
            want, scales = fp8.quantise(before[name])
            assert torch.equal(after[name].view(torch.uint8), want.view(torch.uint8)), name
            assert torch.equal(after[name + "_scale_inv"], scales), name
        else:
            assert torch.equal(after[name], before[name]), name


def test_the_config_is_read_as_block_fp8_by_transformers_and_vllm_keeps_what_is_not_quantised(
    tiny, blockwise, tmp_path
):
    found = json.loads((blockwise / "config.json").read_text())
    assert found["dtype"] == "bfloat16"
    said = found["quantization_config"]
    assert said["quant_method"] == "fp8" and said["weight_block_size"] == [128, 128] and said["fmt"] == "e4m3"
    assert said["modules_to_not_convert"] == [
        "lm_head", "model.layers.1.mlp.gate", "model.layers.2.mlp.gate", "model.layers.3.eh_proj", "model.layers.3.mlp.gate",
    ]  # fmt: skip
    hf_to_megatron(tiny("nemotron_h"), tmp_path / "m", quiet=True)
    megatron_to_hf(tmp_path / "m", tmp_path / "hf", blockwise=True, quiet=True)
    kept = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "backbone.layers.0.mixer.in_proj" in kept and "backbone.layers.0.mixer.out_proj" in kept
    assert tensors(tmp_path / "hf")["backbone.layers.0.mixer.in_proj.weight"].dtype == torch.bfloat16


def test_fp8_weights_are_multiplied_out_on_the_way_in(blockwise, tmp_path, capsys):
    hf_to_megatron(blockwise, tmp_path / "m", Cut(tp=2, ep=2, etp=1), quiet=True)
    megatron_to_hf(tmp_path / "m", tmp_path / "plain", quiet=True)
    stored, plain = tensors(blockwise), tensors(tmp_path / "plain")
    for name, tensor in plain.items():
        want = stored[name]
        if want.dtype == torch.float8_e4m3fn:
            want = fp8.dequantise(want, stored[name + "_scale_inv"], torch.bfloat16)
        assert torch.equal(tensor, want), name
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert cli.verify([str(blockwise), str(tmp_path / "m"), "--quiet"]) == 0
    assert capsys.readouterr().out == "equal: 169 tensors\n"


def test_a_scale_that_is_missing_or_of_another_shape_is_refused(blockwise, tmp_path, capsys):
    import shutil

    name = "model.layers.0.self_attn.o_proj.weight"
    for change, words in (
        (lambda found: found.pop(name + "_scale_inv"), f"{name} is F8_E4M3 without {name}_scale_inv"),
        (
            lambda found: found.update({name + "_scale_inv": torch.ones(2, 1)}),
            f"{name}_scale_inv is F32 (2, 1), expected F32 (1, 1) for a weight of (96, 96)",
        ),
    ):
        broken = tmp_path / "broken"
        shutil.copytree(blockwise, broken)
        found = tensors(broken)
        change(found)
        save_file(found, broken / "model.safetensors")
        (broken / "model.safetensors.index.json").unlink()
        assert cli.hf_to_megatron([str(broken), str(tmp_path / "m"), "--quiet"]) == 1
        assert words in capsys.readouterr().err
        shutil.rmtree(broken)
