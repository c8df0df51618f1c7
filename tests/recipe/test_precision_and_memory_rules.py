"""What `check` refuses in the sections `precision` and `memory`, torch-free, by GPU generation and model sizes."""

from __future__ import annotations

import pytest

from megatron_agentrl.recipe import memory_rules, precision_rules
from megatron_agentrl.recipe.leaves import get, leaves
from megatron_agentrl.recipe.memory_rules import memory_problems
from megatron_agentrl.recipe.model_kinds import Linear, kinds, letters, linears
from megatron_agentrl.recipe.precision_rules import precision_problems
from megatron_agentrl.recipe.schema import Recipe, Topology
from megatron_agentrl.recipe.values import parse

NANO = {
    "model_type": "nemotron_h", "hidden_size": 2688, "hybrid_override_pattern": "MEM*EM-E", "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "mamba_num_heads": 64, "mamba_head_dim": 64,
    "n_groups": 8, "ssm_state_size": 128, "n_routed_experts": 128, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768, "intermediate_size": 6144,
}  # fmt: skip
FP8 = "model.dtype=bf16 precision.fp8=hybrid precision.compute_capability=9.0"


@pytest.fixture
def engine(monkeypatch):
    """Transformer Engine is there."""
    for rules in (precision_rules, memory_rules):
        monkeypatch.setattr(rules, "transformer_engine_missing", lambda: None)


def made(text: str) -> Recipe:
    recipe = Recipe()
    for override in text.split():
        key, _, value = override.partition("=")
        section, _, name = key.rpartition(".")
        setattr(get(recipe, section), name, parse(leaves()[key], value))
    return recipe


def found(text: str, config: dict | None = None, gpus: int = 0) -> list[str]:
    recipe = made(text)
    return [*precision_problems(recipe, config), *memory_problems(recipe, config, gpus)]


def test_the_defaults_and_the_half_types_are_legal_for_every_model():
    for config in (None, NANO, QWEN):
        for dtype in ("fp32", "bf16", "fp16"):
            assert found(f"model.dtype={dtype}", config) == []


def test_fp8_names_the_package_where_transformer_engine_is_absent(monkeypatch):
    monkeypatch.setattr(precision_rules.importlib.util, "find_spec", lambda name: None)
    assert found(FP8) == [
        "precision.fp8=hybrid: Transformer Engine is not installed; pip install 'megatron-agentrl[gpu]' "
        "(transformer-engine), or set precision.fp8=null"
    ]


def test_an_empty_package_of_that_name_is_not_transformer_engine(monkeypatch, tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert precision_rules.transformer_engine_missing() == "Transformer Engine is installed without its part for torch"
    (tmp_path / "transformer_engine" / "pytorch").mkdir()
    (tmp_path / "transformer_engine" / "pytorch" / "__init__.py").touch()
    assert precision_rules.transformer_engine_missing() is None


@pytest.mark.parametrize(
    ("capability", "legal"),
    [
        ("8.0", []),
        ("8.9", ["delayed", "tensorwise"]),
        ("9.0", ["delayed", "tensorwise", "blockwise"]),
        ("10.0", ["delayed", "tensorwise", "blockwise", "mxfp8"]),
        ("10.3", ["delayed", "tensorwise", "blockwise", "mxfp8"]),
        ("12.0", ["delayed", "tensorwise", "blockwise"]),
    ],
)
def test_which_fp8_recipes_a_gpu_generation_has(engine, capability, legal):
    for name in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        lines = found(
            f"model.dtype=bf16 precision.fp8=e4m3 precision.fp8_recipe={name} precision.compute_capability={capability}"
        )
        assert (lines == []) == (name in legal), (name, lines)
        if name not in legal:
            assert f"the GPU's compute capability is {capability}" in lines[0]
            assert lines[0].endswith(f"set precision.fp8_recipe={legal[-1]}" if legal else "set precision.fp8=null")


def test_the_capability_comes_from_the_driver_and_its_absence_is_said(engine, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 9.0\necho 8.9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert precision_rules.compute_capability() == 8.9
    assert (
        "capability is 8.9, expected 9.0 or later; set precision.fp8_recipe=tensorwise"
        in found("model.dtype=bf16 precision.fp8=e4m3 precision.fp8_recipe=blockwise")[0]
    )
    tool.write_text("#!/bin/sh\necho no driver >&2\nexit 9\n")
    assert precision_rules.compute_capability() is None
    assert (
        "found no GPU here, expected compute capability 8.9 or later" in found("model.dtype=bf16 precision.fp8=e4m3")[0]
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("precision.fp8_margin=1", "precision.fp8_margin=1: has no effect without precision.fp8"),
        ("precision.bf16_modules=mamba", "has no effect without precision.fp8"),
        (FP8.replace("bf16", "fp32", 1), "needs model.dtype=bf16"),
        (FP8 + " precision.fp8_amax_history=2", "set precision.fp8_recipe=delayed"),
        (FP8 + " precision.fp8_head=true", "set precision.fp8_recipe=mxfp8"),
        (FP8 + " precision.fp8_recipe=delayed precision.bf16_last_layers=1", "set precision.fp8_recipe=tensorwise"),
        (FP8 + " precision.bf16_modules=mambo", "mambo is no kind of linear; did you mean mamba?"),
        ("precision.loss_scale=2", "has no effect with model.dtype=fp32"),
        ("model.dtype=fp16 precision.loss_scale=1 precision.loss_scale_min=4", "below precision.loss_scale_min = 4.0"),
        ("model.dtype=bf16 optimizer.name=sgd", "optimizer.name=sgd: keeps no fp32 weights beside model.dtype=bf16"),
        ("precision.gradients=bf16", "gradients of model.dtype=fp32 stay fp32"),
        ("precision.exp_avg=bf16", "needs model.dtype=bf16"),
        ("memory.recompute_layers=2", "has no effect without memory.recompute=full"),
        ("memory.recompute_modules=mlp", "has no effect without memory.recompute=selective"),
        ("memory.recompute=selective", "needs modules; give some of core_attn,mlp,moe"),
        ("memory.recompute=selective memory.recompute_modules=core_atn", "core_atn is no module; did you mean core_attn?"),
        ("memory.recompute=selective memory.recompute_modules=moe,shared_experts", "shared_experts is part of moe"),
        ("memory.optimizer_offload=0.5", "found no GPU, the optimizer's state is in the host's memory already"),
        ("memory.optimizer_offload_overlap=false", "has no effect without memory.optimizer_offload"),
    ],
)  # fmt: skip
def test_one_line_says_what_has_no_effect_or_cannot_be(engine, overrides, words):
    lines = found(overrides)
    assert len(lines) == 1, lines
    assert words in lines[0]


@pytest.mark.parametrize(
    ("module", "config", "words"),
    [
        ("mlp", QWEN, "the model has no mlp layers"),
        ("shared_experts", QWEN, "the model has no shared_experts layers"),
        ("mla_up_proj", NANO, "the model has no multi-latent attention"),
    ],
)
def test_a_module_that_the_model_lacks_is_refused(engine, module, config, words):
    (line,) = found(f"memory.recompute=selective memory.recompute_modules={module}", config)
    assert line == f"memory.recompute_modules: {module}: {words}; leave it out"


def test_modules_that_need_transformer_engine_name_it(monkeypatch):
    monkeypatch.setattr(memory_rules, "transformer_engine_missing", lambda: "Transformer Engine is not installed")
    (line,) = found("memory.recompute=selective memory.recompute_modules=moe_act", NANO)
    assert "transformer-engine" in line and line.endswith("or give moe")
    assert found("memory.recompute=selective memory.recompute_modules=layernorm", NANO) == []
    (line,) = found("memory.recompute=selective memory.recompute_modules=layernorm", NANO, gpus=8)
    assert "megatron-core 0.19.2 fails on a GPU" in line


def test_sizes_must_be_multiples_of_the_recipes_block(engine):
    assert found(FP8, NANO) == []
    blocks = found(FP8 + " precision.fp8_recipe=blockwise", NANO)
    assert blocks[0] == (
        "precision.fp8_recipe=blockwise: mamba in_proj is 10304 x 2688 on a rank, expected multiples of 128; "
        "set precision.bf16_modules=mamba"
    )
    kept = FP8 + " precision.fp8_recipe=blockwise precision.bf16_modules=mamba,mlp,experts"
    assert found(kept, NANO) == []
    assert found(FP8 + " precision.fp8_recipe=blockwise", QWEN) == []
    (line,) = found(FP8 + " precision.bf16_modules=mamba", QWEN)
    assert line == "precision.bf16_modules=mamba: the model has no mamba layers; leave it out"


def test_layers_in_bf16_and_recomputed_layers_fit_a_pipeline_stage(engine):
    text = FP8 + " topology.pp=2 precision.bf16_first_layers=5"
    assert found(text, QWEN) == ["precision.bf16_first_layers=5: a pipeline stage has 4 entries; set 4 or less"]
    text = "topology.pp=2 memory.recompute=full memory.recompute_layers=5"
    assert found(text, NANO) == ["memory.recompute_layers=5: a pipeline stage has 4 layers; set 4 or less"]


def test_kinds_and_sizes_of_linears_by_hand():
    assert letters(QWEN) == "*E*E*E*E"
    assert letters(QWEN | {"mlp_only_layers": [0]}) == "*-*E*E*E"
    assert kinds(NANO) == {"mamba", "attention", "mlp", "experts", "shared_experts"}
    assert list(linears(QWEN, Topology(tp=2, etp=1))) == [
        Linear("attention", "linear_qkv", 2560, 2048),
        Linear("attention", "linear_proj", 2048, 2048),
        Linear("experts", "linear_fc1", 1536, 2048),
        Linear("experts", "linear_fc2", 2048, 768),
    ]
