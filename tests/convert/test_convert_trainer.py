"""Converted checkpoints against the trainer: what it writes itself, and what it reads at other topologies."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from convert_tools import ARCHITECTURES, assert_same, remark, tensors

from megatron_agentrl.convert.dist_folder import DistReader
from megatron_agentrl.convert.to_hf import megatron_to_hf
from megatron_agentrl.convert.to_megatron import Cut, hf_to_megatron
from megatron_agentrl.recipe.schema import Dtype, Mtp, Recipe, Topology


@pytest.fixture(scope="module")
def rank():
    from megatron_agentrl.trainer import topology

    yield topology.init(Topology(), seed=1, timeout=60)
    topology.shutdown()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_checkpoint_is_the_one_that_the_trainer_writes(tiny, tmp_path, rank, name):
    """Keys, shapes, types, chunks, values; with the prediction heads, where there are some. And its own converts back."""
    from megatron_agentrl.trainer import checkpoint, model
    from megatron_agentrl.trainer.weights_io import load_hf

    hf, recipe = json.loads((tiny(name) / "config.json").read_text()), Recipe()
    recipe.model.dtype = Dtype.bf16
    heads = bool(hf.get("num_nextn_predict_layers"))
    recipe.model.mtp = Mtp(train=heads)
    chunks = model.build(hf, recipe, rank)
    load_hf(chunks, hf, tiny(name), rank)
    theirs = DistReader(checkpoint.save_weights(tmp_path / "theirs", [SimpleNamespace(module=c) for c in chunks]))
    hf_to_megatron(tiny(name), tmp_path / "ours", mtp=heads, quiet=True)
    ours = DistReader(tmp_path / "ours")
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        own = ours.tensors[key]
        assert (own.shape, own.dtype) == (tensor.shape, tensor.dtype), key
        chunks_of = [{(c.offsets, c.sizes): c for c in t.chunks} for t in (own, tensor)]
        assert chunks_of[0].keys() == chunks_of[1].keys(), key
        for box, chunk in chunks_of[0].items():
            assert torch.equal(ours.load(key, chunk), theirs.load(key, chunks_of[1][box])), key
    assert (tmp_path / "ours" / "metadata.json").read_text() == (tmp_path / "theirs" / "metadata.json").read_text()
    assert ours.mark.keys() >= theirs.mark.keys()
    megatron_to_hf(tmp_path / "theirs", tmp_path / "hf", hf=tiny(name), quiet=True)
    assert_same(tensors(tiny(name)), tensors(tmp_path / "hf"))


def test_the_trainer_refuses_another_vocabulary_and_a_poisoned_table(tiny, tmp_path, rank):
    """260 rows are padded to 320 or 384, whoever wrote them; 101 rows to 128, and those are another model's."""
    from megatron_agentrl.convert.tiny import make_tiny
    from megatron_agentrl.trainer import checkpoint, model
    from megatron_agentrl.trainer.checkpoint_match import OtherModel
    from megatron_agentrl.trainer.torch_metadata import PoisonedMetadata

    make_tiny("llama", tmp_path / "other", changes={"vocab_size": 101})
    hf_to_megatron(tmp_path / "other", tmp_path / "m", quiet=True)
    hf = json.loads((tiny("llama") / "config.json").read_text())
    chunks = [SimpleNamespace(module=chunk) for chunk in model.build(hf, Recipe(), rank)]
    with pytest.raises(
        OtherModel, match=r"embedding.word_embeddings.weight has shape \(128, 96\), the model's \(320, 96\)"
    ):
        checkpoint.load_weights(tmp_path / "m", chunks)
    poison = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0atouch /tmp\x85R."
    (tmp_path / "m" / ".metadata").write_bytes(poison)
    remark(tmp_path / "m")
    with pytest.raises(PoisonedMetadata, match="posix.system"):
        checkpoint.load_weights(tmp_path / "m", chunks)


def test_the_trainer_loads_it_at_every_topology_and_its_own_save_comes_back(tiny, tmp_path):
    """TP2, PP2, EP2, TP2 x EP2 from checkpoints cut otherwise; then what the trainer saved there, as a folder again."""
    import processes

    cuts = {
        "nemotron_h_latent": Cut(tp=4, pp=2, ep=3, etp=4, first_stage_layers=2, last_stage_layers=4),
        "qwen3_moe": Cut(tp=8, ep=4, etp=2),
        "qwen3": Cut(pp=3),
        "deepseek_v3": Cut(ep=6, etp=1),
    }
    for name, cut in cuts.items():
        shutil.copytree(tiny(name), tmp_path / name)
        hf_to_megatron(tmp_path / name, tmp_path / f"{name}-m", cut, quiet=True)
    moe = "nemotron_h_latent,qwen3_moe,deepseek_v3"
    runs = [f"tp2={moe},qwen3", f"pp2={moe},qwen3", f"ep2={moe}", f"tp2-ep2={moe}"]
    processes.run("../convert/load_worker.py", 2, tmp_path, str(tmp_path), *runs, meetings=len(runs))
    for name in cuts:
        for layout in ("tp2", "pp2") if name == "qwen3" else ("tp2", "pp2", "ep2", "tp2-ep2"):
            megatron_to_hf(
                tmp_path / f"{name}-{layout}", tmp_path / "hf", torch.bfloat16, hf=tmp_path / name, quiet=True
            )
            assert_same(tensors(tmp_path / name), tensors(tmp_path / "hf"))
            shutil.rmtree(tmp_path / "hf")
