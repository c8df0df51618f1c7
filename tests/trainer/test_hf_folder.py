"""Checkpoints that are broken in the ways people meet, and folders that appear whole or not at all."""

import json
from types import SimpleNamespace

import pytest
import torch
from layout_configs import nemotron
from safetensors.torch import load_file, save_file
from weights_shell import shells

from megatron_agentrl.layout.megatron import Coordinates, hf_tensors
from megatron_agentrl.trainer.hf_folder import Checkpoint, WeightsError
from megatron_agentrl.trainer.weights_io import iterate_hf, load_hf, save_hf

CONFIG = nemotron(hybrid_override_pattern="M-", n_groups=4)
ONE = SimpleNamespace(
    rank=0,
    world=1,
    tp=0,
    tp_size=1,
    pp=0,
    pp_size=1,
    vpp_size=1,
    cp_size=1,
    ep=0,
    ep_size=1,
    etp=0,
    etp_size=1,
    first_stage_layers=None,
    last_stage_layers=None,
)
DOWN = "backbone.layers.1.mixer.down_proj.weight"
INDEX = "model.safetensors.index.json"


def values(config=CONFIG):
    """Every element of every tensor another small number (exact in float32)."""
    found, at = {}, 0
    for name, shape in hf_tensors(config).items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(at, at + count, dtype=torch.float32).view(shape)
        at += count
    return found


@pytest.fixture
def source(tmp_path):
    """A model folder in three shards, with the side files of a real one."""
    folder = tmp_path / "source"
    folder.mkdir()
    write_shards(folder, values(), 3)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    return folder


def write_shards(folder, tensors, count):
    names = list(tensors)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = names[number::count]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def edit(folder, name=None, tensor=None, *, file=None, drop=False, in_index=True):
    """Put or drop one tensor in its shard, and in the index unless told otherwise."""
    weight_map = index_of(folder)
    file = file or weight_map[name]
    tensors = load_file(folder / file)
    if drop:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / file)
    if in_index:
        weight_map = {k: v for k, v in weight_map.items() if k != name} | ({} if drop else {name: file})
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def load(folder, config=CONFIG):
    model = shells(config, Coordinates(chunks=((0, 2),)))
    load_hf(model, config, folder, ONE)
    return model


def exported(model, config=CONFIG, dtype=torch.float32):
    return {name: tensor.clone() for name, tensor in iterate_hf(model, config, ONE, dtype)}


def test_every_parameter_is_filled_and_comes_back_bit_equal(source):
    model = load(source)
    for name, parameter in model[0].named_parameters():
        assert not parameter.isnan().any(), name
    found, expected = exported(model), values()
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].equal(expected[name]), name


def test_padded_rows_are_zero_in_the_model(source):
    embedding = dict(load(source)[0].named_parameters())["embedding.word_embeddings.weight"]
    assert embedding.shape == (128, 24) and embedding[101:].count_nonzero() == 0


@pytest.mark.parametrize(
    ("breaking", "message"),
    [
        (lambda f: edit(f, DOWN, drop=True), rf"missing {DOWN} \(24, 44\)"),
        (lambda f: (f / index_of(f)[DOWN]).unlink(), "of-00003.safetensors is missing"),
        (lambda f: edit(f, DOWN, drop=True, in_index=False), f"holds {DOWN}, but it does not"),
        (
            lambda f: edit(f, "model.new_proj.weight", torch.ones(2), file=index_of(f)[DOWN]),
            "unexpected model.new_proj",
        ),
        (lambda f: edit(f, DOWN, torch.ones(44, 24)), rf"{DOWN} has shape \(44, 24\), config.json implies \(24, 44\)"),
        (
            lambda f: edit(f, DOWN, torch.ones(24, 44), file=other_shard(f), in_index=False),
            f"{DOWN} is held by both",
        ),
    ],
    ids=["no tensor", "no shard", "index lies", "unknown tensor", "transposed", "held twice"],
)
def test_a_broken_checkpoint_is_refused_by_name_and_leaves_the_model_untouched(source, breaking, message):
    breaking(source)
    model = shells(CONFIG, Coordinates(chunks=((0, 2),)))
    with pytest.raises(WeightsError, match=message):
        load_hf(model, CONFIG, source, ONE)
    assert all(parameter.isnan().all() for parameter in model[0].parameters())


def other_shard(folder):
    return next(file for file in index_of(folder).values() if file != index_of(folder)[DOWN])


def test_a_cut_shard_is_named(source):
    path = source / index_of(source)[DOWN]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=f"{path.name} is cut or damaged"):
        load(source)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_an_index_that_leaves_its_folder_is_refused(source, file):
    (source / INDEX).write_text(json.dumps({"weight_map": index_of(source) | {DOWN: file}}))
    with pytest.raises(WeightsError, match="only plain file names inside the folder"):
        load(source)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_no_index_is_refused(source, text):
    (source / INDEX).write_text(text)
    with pytest.raises(WeightsError, match="is no safetensors index"):
        load(source)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "found a list"), (None, "is missing")])
def test_a_config_that_is_none_is_refused_by_name(source, tmp_path, text, message):
    (source / "config.json").unlink() if text is None else (source / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=f"config.json.*{message}"):
        save_hf(tmp_path / "out", source, values().items())


def test_what_a_killed_export_left_goes_with_the_next_one(source, tmp_path):
    for left in (".out.partial", ".out.older"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "shard-0.tmp").write_bytes(b"half")
    save_hf(tmp_path / "out", source, values().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="neither model.safetensors nor"):
        Checkpoint(tmp_path)


def test_the_other_spelling_of_the_embedding_is_read_and_both_at_once_are_refused(source):
    tensor = values()["backbone.embeddings.weight"]
    file = index_of(source)["backbone.embeddings.weight"]
    edit(source, "backbone.embedding.weight", tensor, file=file)
    with pytest.raises(WeightsError, match="same tensor under two names"):
        load(source)
    edit(source, "backbone.embeddings.weight", drop=True)
    assert exported(load(source))["backbone.embeddings.weight"].equal(tensor)


def test_a_model_with_another_parameter_or_shape_is_refused(source):
    model = shells(CONFIG, Coordinates(chunks=((0, 2),)))
    model[0].put("decoder.layers.0.extra.weight", torch.ones(2))
    model[0].put("decoder.final_norm.weight", torch.ones(3))
    with pytest.raises(WeightsError) as error:
        load_hf(model, CONFIG, source, ONE)
    assert "parameter decoder.layers.0.extra.weight (chunk 0) has no layout" in str(error.value)
    assert "decoder.final_norm.weight has shape (3,), its layout (24,)" in str(error.value)


def test_an_export_holds_equal_tensors_however_many_shards_it_has(source, tmp_path):
    model = load(source)
    for name, shard_bytes in (("one", 10**9), ("many", 8_000)):
        assert save_hf(tmp_path / name, source, iterate_hf(model, CONFIG, ONE, torch.float32), shard_bytes)
    one, many = tmp_path / "one", tmp_path / "many"
    assert len(list(one.glob("*.safetensors"))) == 1 and len(list(many.glob("*.safetensors"))) > 3
    for folder in (one, many):
        assert exported(load(folder)).keys() == values().keys()
        index = json.loads((folder / INDEX).read_text())
        tensors = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
        assert all(name in tensors[file] for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in values().values())
        for name, tensor in values().items():
            assert tensors[index["weight_map"][name]][name].equal(tensor)
    assert sorted(path.name for path in one.iterdir()) == sorted(
        ["model.safetensors", INDEX, "config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "one", "source"]


def test_an_export_in_bf16_keeps_load_bearing_tensors_in_fp32_and_says_its_type(source, tmp_path):
    save_hf(tmp_path / "out", source, iterate_hf(load(source), CONFIG, ONE, torch.bfloat16))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name.split(".")[-1] for name, tensor in tensors.items() if tensor.dtype is torch.float32}
    assert kept == {"A_log", "D", "dt_bias"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == CONFIG | {"dtype": "bfloat16"}


def test_an_export_that_fails_midway_leaves_no_folder_and_the_older_one_stays(source, tmp_path):
    model, out = load(source), tmp_path / "out"

    def failing():
        for count, item in enumerate(iterate_hf(model, CONFIG, ONE, torch.float32)):
            if count == 7:
                raise OSError("disk full")
            yield item

    with pytest.raises(OSError, match="disk full"):
        save_hf(out, source, failing(), shard_bytes=8_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]  # nor a hidden half of one
    save_hf(out, source, iterate_hf(model, CONFIG, ONE, torch.float32))
    with pytest.raises(OSError, match="disk full"):
        save_hf(out, source, failing(), shard_bytes=8_000)
    assert exported(load(out)).keys() == values().keys()
    save_hf(out, source, iterate_hf(model, CONFIG, ONE, torch.float32))
    assert not list(tmp_path.glob(".out*"))


def test_an_export_with_a_tensor_missing_or_twice_is_refused(source, tmp_path):
    items = list(values().items())
    with pytest.raises(WeightsError, match="1 tensors were not given, e.g. lm_head.weight"):
        save_hf(tmp_path / "out", source, items[:-1])
    with pytest.raises(WeightsError, match="came twice"):
        save_hf(tmp_path / "out", source, [*items, items[0]])
    assert not (tmp_path / "out").exists()


def test_a_rank_that_only_gets_nones_writes_nothing(source, tmp_path):
    busy = tmp_path / ".out.partial"  # the folder in which another rank is writing
    busy.mkdir()
    assert not save_hf(tmp_path / "out", source, [(name, None) for name in values()])
    with pytest.raises(WeightsError, match="came twice"):
        save_hf(tmp_path / "out", source, [("lm_head.weight", None)] * 2)
    assert busy.is_dir() and not (tmp_path / "out").exists()


def test_multi_token_prediction_tensors_are_left_aside_and_carried_over(source, tmp_path):
    mtp = torch.arange(6.0).view(2, 3)
    edit(source, "mtp.layers.0.eh_proj.weight", mtp, file=index_of(source)[DOWN])
    save_hf(tmp_path / "out", source, iterate_hf(load(source), CONFIG, ONE, torch.bfloat16))
    assert load_file(tmp_path / "out" / "model.safetensors")["mtp.layers.0.eh_proj.weight"].equal(mtp)


def test_a_tied_checkpoint_loads_with_or_without_a_second_head(source, tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="tie_word_embeddings=true, but lm_head.weight differs from backbone.emb"):
        load(source, config)
    edit(
        source,
        "lm_head.weight",
        values()["backbone.embeddings.weight"].float(),
        file=index_of(source)["lm_head.weight"],
    )
    model = load(source, config)  # the source still holds lm_head.weight
    assert "output_layer.weight" not in dict(model[0].named_parameters())
    save_hf(tmp_path / "out", source, iterate_hf(model, config, ONE, torch.float32))
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert exported(load(tmp_path / "out", config), config)["backbone.embeddings.weight"].equal(
        values()["backbone.embeddings.weight"]
    )
