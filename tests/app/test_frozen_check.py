"""Folders of a reference or a teacher, judged by `check` from their headers before anything starts."""

import json
from pathlib import Path

import numpy
import pytest
from quickstart_shape import CONFIG, write_model
from safetensors.numpy import save_file

from megatron_agentrl.app.checks import check
from megatron_agentrl.layout.megatron import hf_tensors
from megatron_agentrl.planner.memory import estimate
from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.load import load
from megatron_agentrl.recipe.schema import Recipe

REPOSITORY = Path(__file__).parents[2]


def model(folder: Path) -> None:
    write_model(folder)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A model whose safetensors are zeros in its config's shapes, and prompts."""
    monkeypatch.chdir(REPOSITORY)
    model(tmp_path / "model")
    save_file({name: numpy.zeros(shape, "float32") for name, shape in hf_tensors(CONFIG).items()}, tmp_path / "model/model.safetensors")  # fmt: skip
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    return tmp_path


def recipe(folder: Path, *overrides: str) -> Recipe:
    common = [
        f"model.path={folder}/model",
        "model.init=random",
        "model.max_length=128",
        f"data.prompts={folder}/train.jsonl",
    ]
    common += ["sampling.max_tokens=14", "sampling.max_response_tokens=56", f"run_root={folder}", *overrides]
    return load(common, REPOSITORY / "recipes", needs_file=False)


def test_a_whole_reference_and_teacher_pass_and_stand_in_the_summary(folder):
    both = [f"algorithm.{name}_path={folder}/model" for name in ("reference", "teacher")]
    lines = check(recipe(folder, *both, "algorithm.kl_coef=0.1", "algorithm.teacher_coef=0.5"))
    assert f"reference: {folder}/model, kl_coef 0.1" in lines
    assert f"teacher: {folder}/model, teacher_coef 0.5" in lines


@pytest.mark.parametrize(("leaf", "coef"), [("reference_path", "kl_coef"), ("teacher_path", "teacher_coef")])
def test_weights_that_are_not_the_configs_are_refused_by_name_and_shape(folder, leaf, coef):
    model(folder / "other")
    given = recipe(folder, f"algorithm.{leaf}={folder}/other", f"algorithm.{coef}=0.1")
    with pytest.raises(RecipeError, match=rf"algorithm.{leaf}=.*/other has neither model.safetensors nor"):
        check(given)
    shapes = hf_tensors(CONFIG) | {"backbone.norm_f.weight": (7,)}
    save_file(
        {name: numpy.zeros(shape, "float32") for name, shape in shapes.items()}, folder / "other/model.safetensors"
    )
    with pytest.raises(
        RecipeError, match=rf"algorithm.{leaf}=.*norm_f.weight has shape \(7,\), config.json implies \(128,\)"
    ):
        check(given)
    (folder / "other/config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    with pytest.raises(RecipeError, match=rf"algorithm.{leaf}: .*model_type is 'gpt2', expected one of"):
        check(given)


def test_host_memory_counts_each_set_of_weights_once(folder):
    plain = estimate(recipe(folder), CONFIG, gpu=False).trainer
    with_teacher = recipe(folder, f"algorithm.teacher_path={folder}/model", "algorithm.teacher_coef=1")
    weights = 4 * sum(int(numpy.prod(shape)) for shape in hf_tensors(CONFIG).values())
    assert estimate(with_teacher, CONFIG, gpu=False).trainer - plain == pytest.approx(weights)
    assert estimate(with_teacher, CONFIG, gpu=False, mode="sft").trainer == plain
