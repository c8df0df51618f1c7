"""Bad input: refused before anything is written or rolled back, with the name, both values and one way out."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import multiprocessing
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from convert_tools import remark, tensors
from safetensors.torch import save_file

from megatron_agentrl.convert import cli
from megatron_agentrl.convert.to_megatron import Cut, hf_to_megatron


def refusal(capsys, src, *flags, tool=cli.hf_to_megatron):
    """What the tool says; it must fail and leave nothing."""
    before = sorted(path.name for path in src.parent.iterdir())
    assert tool([str(src), str(src.parent / "result"), "--quiet", *flags]) == 1
    assert sorted(path.name for path in src.parent.iterdir()) == before
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err


def edit(folder, change, file="model.safetensors"):
    """Change a folder's tensors as a dict."""
    found = tensors(folder)
    change(found)
    save_file(found, folder / file)
    (folder / "model.safetensors.index.json").unlink()


DOWN = "model.layers.1.mlp.down_proj.weight"


def drop(found):
    del found[DOWN]


def transpose(found):
    found[DOWN] = found[DOWN].T.contiguous()


def rename(found):
    found["model.layers.0.mlp.new_proj.weight"] = found.pop(DOWN)


@pytest.mark.parametrize(
    "change, words",
    [
        (drop, [f"missing {DOWN} (96, 176)"]),
        (transpose, [f"{DOWN} has shape (176, 96), config.json implies (96, 176)"]),
        (rename, [f"missing {DOWN} (96, 176)", "unexpected model.layers.0.mlp.new_proj.weight (96, 176)"]),
    ],
)
def test_a_missing_misshapen_or_renamed_tensor(copy_of, capsys, change, words):
    source = copy_of("llama")
    edit(source, change)
    said = refusal(capsys, source)
    assert all(word in said for word in words) and "put the two files of one model there" in said


def test_a_truncated_file(copy_of, capsys):
    source = copy_of("llama")
    os.truncate(source / "model.safetensors", (source / "model.safetensors").stat().st_size - 100)
    assert "model.safetensors is cut or damaged" in refusal(capsys, source)


def two_files(source, extra=()):
    found = tensors(source)
    names = sorted(found)
    (source / "model.safetensors").unlink()
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: found[name] for name in {*held, *extra}}, source / file)
    index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_a_tensor_in_two_files(copy_of, capsys):
    source = copy_of("llama")
    two_files(source, extra=(DOWN,))
    assert f"{DOWN} is held by both a.safetensors and b.safetensors" in refusal(capsys, source)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", ".."])
def test_an_index_that_points_outside(copy_of, capsys, file):
    source = copy_of("llama")
    index = two_files(source)
    index["weight_map"][DOWN] = file
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refusal(capsys, source)
    assert f"{DOWN} points to {file!r}" in said and "only plain file names inside the folder are read" in said


def test_an_index_that_names_what_its_file_does_not_hold(copy_of, capsys):
    source = copy_of("llama")
    index = two_files(source)
    other = "b.safetensors" if index["weight_map"][DOWN] == "a.safetensors" else "a.safetensors"
    index["weight_map"][DOWN] = other
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"says that {other} holds {DOWN}, but it does not" in refusal(capsys, source)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "gpt2"}, ["model_type 'gpt2' has no layout", "'llama'"]),
        ({"num_hidden_layers": 2}, ["unexpected model.layers.2."]),
        ({"tie_word_embeddings": True}, ["lm_head.weight differs from model.embed_tokens.weight", "set tie_word_embeddings to false"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quant_method='gptq'", "unquantised checkpoint"]),
    ],
)  # fmt: skip
def test_a_config_of_another_model(copy_of, capsys, change, words):
    source = copy_of("llama")
    config = json.loads((source / "config.json").read_text()) | change
    (source / "config.json").write_text(json.dumps(config))
    said = refusal(capsys, source)
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    "name, flags, words",
    [
        ("llama", ["--tp", "3"], ["--tp=3", "4 attention heads", "sizes that fit: 1, 2, 4"]),
        ("llama", ["--pp", "4"], ["4 does not divide the model's 6 layers", "--first-stage-layers"]),
        ("llama", ["--pp", "7"], ["7 stages", "6 layers"]),
        ("llama", ["--ep", "2"], ["--ep=2", "no experts"]),
        ("llama", ["--vpp", "2"], ["--vpp=2", "pp > 1"]),
        ("llama", ["--tp", "0"], ["--tp 0: expected 1 or more"]),
        ("qwen3_moe", ["--ep", "5"], ["--ep=5", "12 experts", "sizes that fit"]),
        ("qwen3_moe", ["--etp", "3"], ["--etp=3", "80 columns"]),
        ("llama", ["--mtp"], ["no weights of multi-token-prediction heads", "leave out --mtp"]),
    ],
)
def test_a_topology_that_does_not_divide(copy_of, capsys, name, flags, words):
    said = refusal(capsys, copy_of(name), *flags)
    assert all(word in said for word in words)


def test_weights_that_would_be_unpickled(copy_of, capsys, tmp_path):
    source = copy_of("llama")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").unlink()

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    said = refusal(capsys, source)
    assert "pytorch_model.bin, which would have to be unpickled" in said and "save_pretrained" in said
    assert not (tmp_path / "ran").exists()


# ---- distributed checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tiny, tmp_path):
    hf_to_megatron(tiny("llama"), tmp_path / "ckpt", Cut(tp=2), quiet=True, workers=1)
    return tmp_path / "ckpt"


def test_a_poisoned_table_is_refused_and_not_run(checkpoint, capsys, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    table = pickle.loads((checkpoint / ".metadata").read_bytes())
    table.planner_data = Payload()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))
    remark(checkpoint)
    said = refusal(capsys, checkpoint, tool=cli.megatron_to_hf)
    assert f"it names {os.system.__module__}.system, which no checkpoint needs; nothing of it was run" in said
    assert not (tmp_path / "ran").exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())  # the payload is a real one
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "torch.load", "torch.hub.load", "pathlib.Path.unlink", "os.PathLike"]
)
def test_a_table_that_names_anything_else_is_refused(checkpoint, capsys, name):
    module, _, attribute = name.rpartition(".")
    poison = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
    poison += b"\x8c" + bytes([len(attribute)]) + attribute.encode() + b"\x93."
    (checkpoint / ".metadata").write_bytes(poison)
    remark(checkpoint)
    assert f"it names {name}" in refusal(capsys, checkpoint, tool=cli.megatron_to_hf)


def test_a_record_that_is_no_tensor_is_refused_and_not_run(checkpoint, capsys, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    table = pickle.loads((checkpoint / ".metadata").read_bytes())
    index = next(index for index in table.storage_data if index.fqn == "decoder.final_norm.weight")
    place = table.storage_data[index]
    with (checkpoint / place.relative_path).open("ab") as file:
        place.offset = file.tell()
        torch.save(Payload(), file)
        place.length = file.tell() - place.offset
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))
    remark(checkpoint)
    assert "the record of decoder.final_norm.weight is damaged, or holds more than a tensor" in refusal(
        capsys, checkpoint, tool=cli.megatron_to_hf
    )
    assert not (tmp_path / "ran").exists()


def test_a_table_that_points_outside_or_does_not_cover(checkpoint, capsys):
    def broken(change):
        table = pickle.loads(whole)
        index = next(index for index in table.storage_data if index.fqn == "decoder.layers.1.mlp.linear_fc2.weight")
        change(table, index)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(table))
        remark(checkpoint)
        return refusal(capsys, checkpoint, tool=cli.megatron_to_hf)

    whole = (checkpoint / ".metadata").read_bytes()

    def outside(table, index):
        table.storage_data[index].relative_path = "../other.distcp"

    def hole(table, index):
        table.state_dict_metadata[index.fqn].chunks.pop()

    def double(table, index):
        chunks = table.state_dict_metadata[index.fqn].chunks
        chunks[1] = chunks[0]

    def beyond(table, index):
        table.storage_data[index].length += 10**9

    assert "points to '../other.distcp'; only plain file names" in broken(outside)
    assert "its chunks hold 8448 of 16896 elements" in broken(hole)
    assert "chunks at (0, 0) and (0, 0) overlap" in broken(double)
    assert "decoder.layers.1.mlp.linear_fc2.weight should lie at bytes" in broken(beyond)


def test_an_incomplete_or_changed_checkpoint(checkpoint, capsys):
    file = next(checkpoint.glob("*.distcp"))
    size = file.stat().st_size
    os.truncate(file, size - 1)
    said = refusal(capsys, checkpoint, tool=cli.megatron_to_hf)
    assert f"{file.name} has {size - 1} bytes, {size} bytes were written" in said
    (checkpoint / "complete.json").unlink()
    assert "no complete.json, the checkpoint was not completed" in refusal(capsys, checkpoint, tool=cli.megatron_to_hf)


def test_a_checkpoint_of_another_model(checkpoint, tiny, capsys):
    said = refusal(capsys, checkpoint, "--hf", str(tiny("qwen3")), tool=cli.megatron_to_hf)
    assert "is no checkpoint of the model in" in said and "q_layernorm.weight" in said


def test_a_checkpoint_whose_model_is_not_known(checkpoint, tiny, capsys):
    shutil.rmtree(checkpoint / "hf")
    mark = json.loads((checkpoint / "complete.json").read_text())
    mark["files"] = {name: size for name, size in mark["files"].items() if not name.startswith("hf/")}
    (checkpoint / "complete.json").write_text(json.dumps(mark))
    assert "pass --hf with the Hugging Face folder" in refusal(capsys, checkpoint, tool=cli.megatron_to_hf)
    (checkpoint.parent / "recipe.yaml").write_text(f"model:\n  path: {tiny('llama')}\n")
    assert cli.megatron_to_hf([str(checkpoint), str(checkpoint.parent / "out"), "--quiet"]) == 0


# ---- targets and disks ------------------------------------------------------------------------------------------------


def test_a_target_that_exists_is_kept_unless_forced(copy_of, tmp_path, capsys):
    source = copy_of("llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    assert cli.hf_to_megatron([str(source), str(tmp_path / "out"), "--quiet"]) == 1
    assert "exists already" in capsys.readouterr().err and (tmp_path / "out" / "mine").read_text() == "keep"
    assert cli.hf_to_megatron([str(source), str(tmp_path / "out"), "--quiet", "--force"]) == 0
    assert not (tmp_path / "out" / "mine").exists() and (tmp_path / "out" / "complete.json").exists()


def test_what_a_killed_run_left_is_cleaned_and_a_running_one_is_not_disturbed(copy_of, tmp_path, capsys):
    source = copy_of("llama")
    left = tmp_path / "out.tmp"
    left.mkdir()
    (left / "__9_0.distcp").write_bytes(b"half")
    assert cli.inspect([str(left)]) == 1  # it looks like no checkpoint
    with Path(left / "__9_0.distcp").open() as _:
        handle = os.open(left, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert cli.hf_to_megatron([str(source), str(tmp_path / "out"), "--quiet"]) == 1
        assert "is being written by another run" in capsys.readouterr().err and (left / "__9_0.distcp").exists()
        os.close(handle)
    assert cli.hf_to_megatron([str(source), str(tmp_path / "out"), "--quiet"]) == 0
    assert not left.exists() and not (tmp_path / "out" / "__9_0.distcp").exists()


def test_too_little_space_is_refused_before_anything_is_written(copy_of, capsys, monkeypatch):
    source = copy_of("llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    said = refusal(capsys, source)
    assert "has 0.00 GB free, the result needs 0.00 GB" in said and "another disk" in said


@pytest.mark.parametrize("tool", ["hf_to_megatron", "megatron_to_hf"])
def test_a_disk_that_fills_up_leaves_nothing(copy_of, checkpoint, tmp_path, tool):
    """A limit on file sizes stands for the full disk: the same failing write."""
    source = copy_of("llama") if tool == "hf_to_megatron" else checkpoint
    before = sorted(path.name for path in tmp_path.iterdir())
    with multiprocessing.get_context("fork").Pool(1) as pool:  # the limit must not reach the tests' own process
        code, said = pool.apply(limited, (tool, str(source), str(tmp_path / "out")))
    assert code == 1 and said.startswith("error: ") and "File too large" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def limited(tool, source, target):
    """Exit code and message of a tool that may write files of 200,000 bytes at most."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = getattr(cli, tool)([source, target, "--quiet"])
    return code, said.getvalue()
