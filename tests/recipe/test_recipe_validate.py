"""Validation: each bad input is named with what was found, what was expected and a way out."""

import json
import socket
from pathlib import Path

import pytest
from quickstart_shape import CONFIG, write_model

from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.leaves import leaves
from megatron_agentrl.recipe.load import load
from megatron_agentrl.recipe.validate import POSITIVE, RANGES, gpu_names, problems, validate


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A working folder in which `recipe=good` is valid. The machine has no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_agentrl.recipe.validate.gpu_count", lambda: 0)
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "good.yaml").write_text(
        "model:\n  path: model\n  init: random\n  max_length: 128\ndata:\n  prompts: train.jsonl\n"
        "sampling:\n  max_tokens: 14\n  max_response_tokens: 56\n"
    )
    return tmp_path


def found(folder: Path, *overrides: str, mode: str = "train") -> list[str]:
    return list(problems(load(["recipe=good", *overrides], folder / "recipes"), mode))


def test_a_good_recipe_has_no_problem_and_leaves_no_trace(folder):
    before = sorted(folder.iterdir())
    assert found(folder) == []
    assert sorted(folder.iterdir()) == before


def test_every_numeric_leaf_is_ruled():
    numeric = {leaf.key for leaf in leaves().values() if leaf.kind in (int, float)}
    assert numeric == set(RANGES) | set(POSITIVE)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.batch=0", "train.batch=0: expected at least 1"),
        ("staleness.eta=-1", "staleness.eta=-1: expected at least 0"),
        ("algorithm.group_size=0", "algorithm.group_size=0: expected at least 1"),
        ("sampling.temperature=0", "sampling.temperature=0.0: expected more than 0"),
        ("ports.gateway=70000", "ports.gateway=70000: expected at most 65535"),
        ("rollout.gpu_memory_utilization=1.5", "rollout.gpu_memory_utilization=1.5: expected at most 1.0"),
    ],
)
def test_numbers_out_of_range(folder, override, expected):
    assert found(folder, override) == [expected]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=none-such"], "does not exist; expected a Hugging Face folder"),
        (["model.path=train.jsonl"], "is a file"),
        (["model.init=pretrained"], "has neither model.safetensors nor model.safetensors.index.json"),
        (["algorithm.group_size=1"], "rloo compares a trajectory with the others of its group; set algorithm.group_size=2"),
        (["algorithm.group_size=1", "algorithm.advantage=grpo"], "standard deviation"),
        (["algorithm.importance_cap=3"], "has no effect with algorithm.proximal=behaviour"),
        (["sampling.max_response_tokens=128"], "model.max_length = 128"),
        (["sampling.max_tokens=60"], "one turn may not hold more"),
        (["optimizer.name=adm"], "expected one of adam, sgd"),
        (["optimizer.name=sgd", "optimizer.beta1=0.5"], "has no effect with sgd"),
        (["optimizer.min_lr_fraction=0.1"], "has no effect with optimizer.schedule=constant"),
        (["warm_start.steps=4"], "needs warm_start.data"),
        (["warm_start.steps=4", "warm_start.data=nope"], "warm_start.data=nope: no such file"),
        (["data.prompts=null"], "needs a prompts file"),
        (["data.prompts=model"], "is a folder, expected a JSONL file"),
        (["data.task=chain_sum"], "has no effect with data.source=jsonl"),
        (["data.source=reasoning_gym", "data.prompts=null"], "needs a task"),
        (
            ["data.source=reasoning_gym", "data.task=chain_sum", "data.prompts=train.jsonl"],
            "data.prompts=train.jsonl: has no effect",
        ),
        (["algorithm.correction=mask"], "algorithm.correction=mask: has no effect with algorithm.proximal=behaviour"),
        (["algorithm.dual_clip=1"], "expected a number above 1, or null"),
        (["rollout.engine=vlm"], "did you mean vllm?"),
        (["rollout.engine=vllm"], "found no GPU"),
        (["rollout.tp=2"], "found no GPU, an engine on a CPU is one process"),
        (["rollout.max_batched_tokens=64"], "expected at least rollout.max_num_seqs = 128"),
        (["topology.world=4096"], "at most 4 trainer processes a core"),
        (["ports.host=192.0.2.1"], "cannot listen there"),
        (["ports.gateway=21999", "ports.coordinator=21999"], "the same port as ports.coordinator"),
        (["run_root=train.jsonl/runs"], "train.jsonl is a file, expected a folder"),
        (["run_root=/proc/runs"], "/proc cannot be written"),
        (["run_root=" + "a" * 300], "cannot be reached (file name too long)"),
        (["model.path=" + "a" * 300], "cannot be reached (file name too long)"),
        (["data.prompts=" + "a" * 300], "cannot be reached (file name too long)"),
        (["ports.host=a..b"], "cannot listen there"),
        (["ports.host=::1"], "use an IPv4 address of its own"),
        (["data.train_remainder=true"], "has no effect without data.epochs"),
        (["data.size=7"], "data.size=7: has no effect with data.source=jsonl"),
    ],
)  # fmt: skip
def test_one_line_for_each_bad_input(folder, overrides, words):
    lines = found(folder, *overrides)
    assert len(lines) == 1, lines
    assert words in lines[0]
    assert "\n" not in lines[0]


def test_a_model_folder_without_its_files(folder):
    (folder / "model" / "tokenizer.json").unlink()
    (folder / "model" / "chat_template.jinja").unlink()
    (folder / "model" / "tokenizer_config.json").write_text('{"chat_template": null}')
    first, second = found(folder)
    assert "tokenizer.json is missing" in first
    assert "no chat template" in second


def test_a_config_that_is_missing_broken_or_unknown(folder):
    config = folder / "model" / "config.json"
    config.write_text("{")
    assert "config.json: not valid JSON" in found(folder)[0]
    config.write_text("[]")
    assert "expected a JSON object" in found(folder)[0]
    config.write_text('{"model_type": "gpt2"}')
    assert (
        "model_type is 'gpt2', expected one of deepseek_v3, nemotron_h, qwen3_moe, qwen3, llama; choose"
        in found(folder)[0]
    )
    config.unlink()
    assert "cannot be read (No such file or directory)" in found(folder)[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "128"),
        ("num_attention_heads", 0),
        ("n_groups", -1),
        ("num_hidden_layers", 10**30),
        ("head_dim", True),
    ],
)
def test_a_config_whose_sizes_are_no_sizes(folder, name, value):
    (folder / "model" / "config.json").write_text(json.dumps({**CONFIG, name: value}))
    assert found(folder) == [f"model/config.json: {name} is {value!r}, expected a whole number of at least 1"]


def test_gpus_are_counted_as_cuda_counts_them_and_each_mode_needs_its_own(folder, monkeypatch, tmp_path):
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    for visible, names in (
        ("1", ["1"]),
        ("-1", []),
        ("", []),
        ("GPU-a, GPU-b,GPU-c", ["GPU-a", "GPU-b"]),
        ("0,-1,1", ["0"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_names(devices) == names
    monkeypatch.setattr("megatron_agentrl.recipe.validate.gpu_count", lambda: 1)
    assert "need 2 GPUs, found 1" in found(folder)[0]
    assert found(
        folder,
        mode="sft",
    ) == ["warm_start.steps=0: the sft command runs the warm start only; set warm_start.steps"]


def test_weight_files_that_an_index_names_must_be_there(folder):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model" / "one.safetensors").touch()
    assert "1 of 2 weight files are missing (two.safetensors)" in found(folder, "model.init=pretrained")[0]


def test_an_evaluation_needs_weights_and_held_out_prompts(folder):
    lines = found(folder, mode="eval")
    assert "has neither model.safetensors nor model.safetensors.index.json" in lines[0]
    assert "the eval command needs held-out prompts" in lines[1]


def test_a_port_in_use_is_named(folder):
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        (line,) = found(folder, f"ports.gateway={port}")
    assert line == (
        f"ports.gateway={port}: the port on 127.0.0.1 cannot be used (address already in use); "
        "stop its owner or set ports.gateway=0"
    )


def test_several_problems_are_all_reported(folder):
    with pytest.raises(RecipeError) as caught:
        validate(load(["recipe=good", "optimizer.name=x", "data.task=y"], folder / "recipes"))
    assert len(str(caught.value).splitlines()) == 2
