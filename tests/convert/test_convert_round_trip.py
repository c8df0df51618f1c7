"""Hugging Face -> distributed checkpoint -> Hugging Face: bit-equal at every cut, and all that is no tensor comes back."""

from __future__ import annotations

import json

import pytest
import torch
from convert_tools import ARCHITECTURES, assert_same, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_agentrl.convert import cli
from megatron_agentrl.convert.dist_folder import DistReader
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.tiny import make_tiny
from megatron_agentrl.convert.to_hf import megatron_to_hf
from megatron_agentrl.convert.to_megatron import Cut, hf_to_megatron
from megatron_agentrl.layout.boxes import LayoutError

#: (architecture, cut): uneven and virtual stages, two key/value heads with TP 8, EP with ETP, worlds up to 64.
CUTS = [
    ("nemotron_h", Cut(tp=2, pp=2, ep=3, etp=1, first_stage_layers=2, last_stage_layers=4)),
    ("nemotron_h", Cut(tp=4, ep=2, etp=2)),
    ("nemotron_h_latent", Cut(pp=3, vpp=2, ep=4)),
    ("nemotron_h_latent", Cut(tp=2, pp=1, ep=12, etp=2)),
    ("qwen3_moe", Cut(tp=8, pp=2, ep=4, etp=8)),
    ("qwen3_moe", Cut(tp=4, pp=3, ep=6, etp=2)),
    ("qwen3", Cut(tp=2, pp=3, vpp=2)),
    ("llama", Cut(tp=4, pp=3, first_stage_layers=1, last_stage_layers=2)),
    ("deepseek_v3", Cut(tp=2, ep=4, etp=1)),
    ("deepseek_v3", Cut(tp=4, pp=6, ep=3, etp=4)),
]


@pytest.mark.parametrize("name, cut", CUTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_model_comes_back_bit_equal_from_every_cut(tiny, tmp_path, name, cut):
    """Two trips in a row, through this cut and through a plain one with the heads as parameters."""
    source = tiny(name)
    has_heads = json.loads((source / "config.json").read_text()).get("num_nextn_predict_layers")
    hf_to_megatron(source, tmp_path / "a", cut, quiet=True)
    megatron_to_hf(tmp_path / "a", tmp_path / "hf", quiet=True)
    assert_same(tensors(source), tensors(tmp_path / "hf"))
    hf_to_megatron(tmp_path / "hf", tmp_path / "b", mtp=bool(has_heads), quiet=True)
    assert any(key.startswith("mtp.") for key in DistReader(tmp_path / "b").tensors) == bool(has_heads)
    megatron_to_hf(tmp_path / "b", tmp_path / "back", shard_bytes=150_000, quiet=True)
    assert_same(tensors(source), tensors(tmp_path / "back"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(source).values())
    assert len(set(index["weight_map"].values())) > 3


@given(
    tp=st.sampled_from([1, 2, 3, 4, 6, 8]), pp=st.integers(1, 4), vpp=st.integers(1, 2), ep=st.sampled_from([1, 2, 3, 5, 12]),
    etp=st.sampled_from([None, 1, 2, 4]), name=st.sampled_from(["nemotron_h", "qwen3_moe"]),
)  # fmt: skip
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_any_legal_topology_round_trips_and_any_other_leaves_nothing(
    tiny, tmp_path_factory, tp, pp, vpp, ep, etp, name
):
    folder = tmp_path_factory.mktemp("any")
    try:
        hf_to_megatron(tiny(name), folder / "m", Cut(tp, pp, vpp, ep, etp), quiet=True, workers=1)
    except (ConvertError, LayoutError) as error:
        assert "--" in str(error) and list(folder.iterdir()) == []
        return
    megatron_to_hf(folder / "m", folder / "hf", quiet=True, workers=1)
    assert_same(tensors(tiny(name)), tensors(folder / "hf"))


def test_all_that_is_no_tensor_comes_back_byte_for_byte(copy_of, tmp_path):
    source = copy_of("deepseek_v3")
    text = (
        (source / "config.json")
        .read_text()
        .replace('"use_cache": true', '"use_cache":   true,\n "of_our_own": [1.50, null]')
    )
    (source / "config.json").write_text(text)
    (source / "added_tokens.json").write_text('{"<new>":  260}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    hf_to_megatron(source, tmp_path / "m", Cut(tp=2), quiet=True)
    megatron_to_hf(tmp_path / "m", tmp_path / "hf", quiet=True)
    names = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(tmp_path / "hf")) for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    for name in sorted(names - {"model.safetensors", "model.safetensors.index.json"}):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes(), name


def test_a_cast_rounds_to_nearest_even_and_what_must_be_fp32_stays(tmp_path):
    make_tiny("nemotron_h", tmp_path / "src", seed=1)
    found = tensors(tmp_path / "src")
    embedding = found["backbone.embeddings.weight"]
    # 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6; the even mantissa wins.
    embedding[259, :3] = torch.tensor([1.00390625, 1.01171875, 1.00390637])
    save_file(found, tmp_path / "src" / "model.safetensors")
    hf_to_megatron(tmp_path / "src", tmp_path / "m", Cut(tp=4, etp=1), quiet=True)
    megatron_to_hf(tmp_path / "m", tmp_path / "hf", torch.bfloat16, quiet=True)
    cast = tensors(tmp_path / "hf")
    assert cast["backbone.embeddings.weight"][259, :3].tolist() == [1.0, 1.015625, 1.0078125]
    fp32 = {name.rsplit(".", 1)[1] for name, tensor in cast.items() if tensor.dtype == torch.float32}
    assert fp32 == {"A_log", "D", "dt_bias", "e_score_correction_bias"}
    for name, tensor in cast.items():
        assert torch.equal(tensor, found[name].to(tensor.dtype)), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_value_beyond_float16_is_refused_with_its_size(tmp_path, capsys):
    make_tiny("llama", tmp_path / "src")
    found = tensors(tmp_path / "src")
    found["model.norm.weight"][7] = 70000.0
    save_file(found, tmp_path / "src" / "model.safetensors")
    assert cli.hf_to_megatron([str(tmp_path / "src"), str(tmp_path / "m"), "--quiet"]) == 0
    assert cli.megatron_to_hf([str(tmp_path / "m"), str(tmp_path / "hf"), "--dtype", "float16", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "model.norm.weight has the value 70000" in said and "--dtype bfloat16" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "src"]


def test_the_vocabulary_is_padded_by_topology_and_exports_carry_no_padding(tmp_path):
    """C01: vocabulary 101; rows are multiples of 64 * TP, exports have 101."""
    changes = {"vocab_size": 101}
    make_tiny("llama", tmp_path / "src", changes=changes)
    for tp, rows in ((1, 128), (2, 128), (4, 256)):
        hf_to_megatron(tmp_path / "src", tmp_path / f"m{tp}", Cut(tp=tp), quiet=True)
        stored = DistReader(tmp_path / f"m{tp}")
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert stored.tensors[key].shape == (rows, 96)
            assert [chunk.sizes[0] for chunk in stored.tensors[key].chunks] == [rows // tp] * tp
        last = stored.tensors["output_layer.weight"].chunks[-1]
        assert not stored.load("output_layer.weight", last)[101 - last.offsets[0] :].any()
        megatron_to_hf(tmp_path / f"m{tp}", tmp_path / f"hf{tp}", quiet=True)
        assert_same(tensors(tmp_path / "src"), tensors(tmp_path / f"hf{tp}"))


def test_tiny_models_depend_on_the_seed_alone(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_tiny("qwen3", tmp_path / name, seed=seed)
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert_same(a, b)
    assert not torch.equal(a["model.norm.weight"], c["model.norm.weight"])


def test_the_command_line_knows_the_architectures_and_types_without_loading_torch():
    from megatron_agentrl.convert.to_hf import TYPES

    assert cli.ARCHITECTURES == ARCHITECTURES
    assert tuple(TYPES) == cli.TYPES
