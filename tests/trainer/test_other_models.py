"""A checkpoint of another model is refused before a weight is read, with both values."""

from __future__ import annotations

import re

import pytest
import torch
import trainer_toy as toy
from safetensors.torch import save_file

from megatron_agentrl.layout.megatron import hf_tensors
from megatron_agentrl.recipe.weight_files import WeightsError
from megatron_agentrl.trainer import checkpoint, model
from megatron_agentrl.trainer.checkpoint_match import OtherModel
from megatron_agentrl.trainer.hf_headers import differences, locate
from megatron_agentrl.trainer.weights_io import load_hf


@pytest.fixture(scope="module")
def saved(rank, tmp_path_factory):
    """A distributed checkpoint of the hybrid, with its optimizer."""
    chunks, opt = toy.build("nemotron", rank, toy.ADAM)
    return checkpoint.save(tmp_path_factory.mktemp("run"), chunks, opt, 1, {})


def untouched(chunks, load) -> None:
    """`load` has to raise before any parameter changes."""
    before = [parameter.detach().clone() for parameter in chunks[0].parameters()]
    with pytest.raises(OtherModel) as caught:
        load()
    assert all(p.equal(old) for p, old in zip(chunks[0].parameters(), before, strict=True))
    raise caught.value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", "it has no decoder.layers.0.self_attention.linear_qkv.weight (96, 40)"),
        ("latent", "it has no decoder.layers.2.mlp.fc1_latent_proj.weight (24, 40)"),
        ("wider", "its decoder.layers.4.mlp.linear_fc2.weight has shape (40, 52), the model's (40, 56)"),
    ],
)
def test_a_distributed_checkpoint_of_another_architecture_is_refused(rank, saved, name, words, monkeypatch):
    monkeypatch.setitem(toy.MODELS, "wider", toy.NEMOTRON | {"intermediate_size": 56})
    chunks, opt = toy.build(name, rank, toy.ADAM)
    with pytest.raises(OtherModel, match=re.escape(words)) as caught:
        untouched(chunks, lambda: checkpoint.load(saved, chunks, opt))
    assert "resume with the model.path it was trained from" in str(caught.value)


def test_a_distributed_checkpoint_with_more_layers_is_refused(rank, saved, monkeypatch):
    monkeypatch.setitem(toy.MODELS, "shorter", toy.NEMOTRON | {"hybrid_override_pattern": "M*EM-"})
    chunks, _ = toy.build("shorter", rank, toy.ADAM)
    words = "the model has no decoder.layers.5.mlp.experts.experts.linear_fc1.weight (12, 28, 40)"
    with pytest.raises(OtherModel, match=re.escape(words)):
        untouched(chunks, lambda: checkpoint.load_weights(saved, chunks))


def test_the_models_own_checkpoint_loads(rank, saved):
    chunks, opt = toy.build("nemotron", rank, toy.ADAM)
    assert checkpoint.load(saved, chunks, opt) == {}


@pytest.fixture
def folder(tmp_path):
    """A Llama folder whose config.json the tests change."""
    tensors = {name: torch.zeros(shape) for name, shape in hf_tensors(toy.LLAMA).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 44}, "model.embed_tokens.weight has shape (101, 40), config.json implies (101, 44)"),
        ({"num_hidden_layers": 3}, "missing model.layers.2.input_layernorm.weight (40,)"),
        ({"num_hidden_layers": 1}, "unexpected model.layers.1.input_layernorm.weight (40,)"),
        ({"model_type": "qwen3"}, "missing model.layers.0.self_attn.q_norm.weight (12,)"),
        ({"head_dim": 10}, "q_proj.weight has shape (48, 40), config.json implies (40, 40)"),
    ],
)
def test_safetensors_of_another_model_are_told_by_their_headers(rank, folder, changes, words):
    hf = toy.LLAMA | changes
    assert words in "; ".join(differences(hf, {name: at.shape for name, at in locate(folder, {}).items()}))
    chunks = model.build(hf, toy.recipe(), rank)
    with pytest.raises(WeightsError, match=re.escape("the weights are not the model of config.json")):
        load_hf(chunks, hf, folder, rank)


def test_a_folder_is_its_own_model(folder):
    assert differences(toy.LLAMA, {name: at.shape for name, at in locate(folder, {}).items()}) == []
