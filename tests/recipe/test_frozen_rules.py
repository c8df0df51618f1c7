"""`algorithm.reference_path`, `teacher_path`, `teacher_coef` and `advantage=zero`: what check says of them."""

import json
from pathlib import Path

import pytest

from megatron_agentrl.recipe.frozen_rules import config_differences, frozen_problems
from megatron_agentrl.recipe.schema import Advantage, Dtype, Fp8Format, Recipe

MOE = {
    "model_type": "qwen3_moe", "vocab_size": 101, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 12, "intermediate_size": 52, "num_experts": 12, "num_experts_per_tok": 3,
    "moe_intermediate_size": 28, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 8192,
}  # fmt: skip
DENSE = {key: value for key, value in MOE.items() if "experts" not in key and "moe" not in key} | {
    "model_type": "qwen3"
}
TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}


def folder(path: Path, config: dict, tokenizer: dict | None = TOKENIZER) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(path)


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    made = Recipe()
    made.model.path = folder(tmp_path / "policy", MOE)
    return made


def lines(recipe: Recipe) -> list[str]:
    return list(frozen_problems(recipe, MOE, lambda path, config: iter(())))


def one(recipe: Recipe) -> str:
    (found,) = lines(recipe)
    return found


def test_paths_without_their_coefficient_and_a_coefficient_without_its_path(recipe):
    assert lines(recipe) == []
    recipe.algorithm.reference_path = recipe.algorithm.teacher_path = "x"
    reference, teacher = lines(recipe)
    assert reference.startswith("algorithm.reference_path=x: has no effect with algorithm.kl_coef=0")
    assert teacher.startswith("algorithm.teacher_path=x: has no effect with algorithm.teacher_coef=0")
    recipe.algorithm.reference_path = recipe.algorithm.teacher_path = None
    recipe.algorithm.teacher_coef = 0.5
    assert one(recipe) == (
        "algorithm.teacher_coef=0.5: needs a teacher; set algorithm.teacher_path to its Hugging Face folder"
    )


def test_a_reward_that_teaches_nothing_needs_a_teacher(recipe, tmp_path):
    recipe.algorithm.advantage = Advantage.zero
    assert "there is no teacher; set algorithm.teacher_path" in one(recipe)
    recipe.algorithm.teacher_coef, recipe.algorithm.teacher_path = 1.0, folder(tmp_path / "t", DENSE)
    assert lines(recipe) == []
    recipe.algorithm.shuffle_rewards = True
    assert one(recipe).startswith("algorithm.shuffle_rewards=true: has no effect with algorithm.advantage=zero")


def test_fp8_weights_cannot_be_swapped(recipe):
    recipe.model.dtype, recipe.precision.fp8, recipe.precision.fp8_param_gather = Dtype.bf16, Fp8Format.hybrid, True
    assert lines(recipe) == []
    recipe.algorithm.kl_coef = 0.1
    assert one(recipe).endswith("set precision.fp8_param_gather=false")


def test_a_reference_of_another_architecture_is_named_by_what_differs(recipe, tmp_path):
    recipe.algorithm.kl_coef = 0.1
    recipe.algorithm.reference_path = folder(tmp_path / "same", MOE | {"transformers_version": "5", "eos_token_id": 7})
    assert lines(recipe) == []
    recipe.algorithm.reference_path = folder(tmp_path / "other", MOE | {"num_experts_per_tok": 2, "rope_theta": 5e5})
    found = one(recipe)
    assert "num_experts_per_tok is 2, the policy's 3; rope_theta is 500000.0, the policy's 10000.0;" in found
    assert found.endswith("or distil from it as algorithm.teacher_path")
    recipe.algorithm.reference_path = folder(tmp_path / "kind", DENSE)
    assert "model_type is 'qwen3', the policy's 'qwen3_moe'" in one(recipe)
    recipe.algorithm.reference_path = str(tmp_path / "nowhere")
    assert one(recipe).endswith("config.json cannot be read (no such file or directory); give a Hugging Face folder")


def test_what_does_not_change_a_logit_is_no_difference():
    newer = {key: value for key, value in MOE.items() if key != "rope_theta"}
    newer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "max_position_embeddings": 40960}
    assert config_differences(MOE, newer | {"tie_word_embeddings": False, "_name_or_path": "x"}) == []
    assert config_differences(MOE, MOE | {"norm_topk_prob": True}) == ["norm_topk_prob is True, the policy's None"]


def test_a_teacher_of_another_size_is_judged_on_the_policys_topology(recipe, tmp_path):
    recipe.algorithm.teacher_coef, recipe.algorithm.teacher_path = 1.0, folder(tmp_path / "t", DENSE)
    recipe.topology.world, recipe.topology.ep = 2, 2
    assert one(recipe).endswith("topology.ep=2: the model has no experts; set topology.ep=1")
    recipe.topology.ep, recipe.topology.tp = 1, 8
    assert lines(recipe)[0].startswith(
        f"algorithm.teacher_path={tmp_path}/t: topology.tp=8: the model has 52 MLP columns"
    )
    recipe.topology.tp = recipe.topology.world = 1
    assert lines(recipe) == []
    recipe.algorithm.teacher_path = folder(tmp_path / "few", DENSE | {"vocab_size": 96, "max_position_embeddings": 64})
    vocabulary, positions = lines(recipe)
    assert "its vocabulary has 96 tokens, the policy's 101" in vocabulary
    assert positions.endswith("it has 64 positions (max_position_embeddings), found model.max_length=4096; set model.max_length=64 or less")  # fmt: skip


def test_a_teachers_ids_must_be_the_policys(recipe, tmp_path):
    recipe.algorithm.teacher_coef, recipe.algorithm.teacher_path = 1.0, folder(tmp_path / "none", DENSE, None)
    assert "tokenizer.json is missing, its ids cannot be compared" in one(recipe)
    more = {"model": {"vocab": {"a": 0, "b": 1, "c": 3}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
    recipe.algorithm.teacher_path = folder(tmp_path / "more", DENSE, more)
    assert lines(recipe) == []
    other = {"model": {"vocab": [["a", -1.0], ["c", -2.0], ["b", -3.0]]}, "added_tokens": []}
    recipe.algorithm.teacher_path = folder(tmp_path / "other", DENSE, other)
    assert "'b' is id 2 there and 1 in the policy's (2 of 3 tokens differ)" in one(recipe)
    recipe.algorithm.teacher_path = folder(tmp_path / "broken", DENSE, {"model": {"vocab": 3}})
    assert "broken/tokenizer.json has no vocabulary to compare ids by" in one(recipe)


def test_a_config_that_is_no_model_of_ours_is_said_with_its_key(recipe, tmp_path):
    recipe.algorithm.teacher_coef, recipe.algorithm.teacher_path = 1.0, folder(tmp_path / "t", DENSE)
    found = list(
        frozen_problems(recipe, MOE, lambda path, config: iter([f"{path.name}: {config['model_type']} is odd"]))
    )
    assert found == ["algorithm.teacher_path: t: qwen3 is odd"]
