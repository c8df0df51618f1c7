"""verify.py names the first difference and answers by exit code; inspect.py says what is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from convert_tools import tensors
from safetensors.torch import save_file

from megatron_agentrl.convert import cli
from megatron_agentrl.convert.to_megatron import Cut, hf_to_megatron

TOOLS = Path(__file__).parents[2] / "tools" / "convert"


def edited(folder, change):
    found = tensors(folder)
    change(found)
    save_file(found, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def test_equal_different_and_unusable(tiny, copy_of, tmp_path, capsys):
    source, other = tiny("nemotron_h"), copy_of("nemotron_h")
    hf_to_megatron(source, tmp_path / "a", Cut(tp=4, etp=2), quiet=True)
    hf_to_megatron(source, tmp_path / "b", Cut(pp=2, ep=4), quiet=True)
    for left, right in (
        (source, other),
        (source, tmp_path / "a"),
        (tmp_path / "b", source),
        (tmp_path / "a", tmp_path / "b"),
    ):
        assert cli.verify([str(left), str(right), "--quiet"]) == 0
        assert capsys.readouterr().out == "equal: 125 tensors\n"

    name = "backbone.layers.0.mixer.conv1d.weight"

    def change(found):
        found[name][5, 0, 2] = 2.5
        found["lm_head.weight"][0, 0] = 9.0  # a later difference is not the one that is printed

    before = float(tensors(source)[name][5, 0, 2])
    edited(other, change)
    assert cli.verify([str(tmp_path / "a"), str(other), "--quiet"]) == 1
    said = capsys.readouterr().out
    assert said == f"{name}[5, 0, 2]: {before:.9g} (bfloat16) in {tmp_path / 'a'}, 2.5 (bfloat16) in {other}\n"

    (tmp_path / "a" / "complete.json").unlink()
    assert cli.verify([str(tmp_path / "a"), str(other), "--quiet"]) == 2
    assert "no complete.json" in capsys.readouterr().err
    assert cli.verify([str(tmp_path / "nothing"), str(other), "--quiet"]) == 2


def test_another_type_is_compared_by_value_and_another_shape_is_a_difference(copy_of, tmp_path, capsys):
    source = copy_of("llama")
    hf_to_megatron(source, tmp_path / "m", quiet=True)
    edited(source, lambda found: found.update({name: tensor.float() for name, tensor in found.items()}))
    assert cli.verify([str(source), str(tmp_path / "m"), "--quiet"]) == 0
    edited(source, lambda found: found["model.norm.weight"].__setitem__(95, 0.5 + 2**-20))
    assert cli.verify([str(source), str(tmp_path / "m"), "--quiet"]) == 1
    assert "model.norm.weight[95]: 0.500000954 (float32)" in capsys.readouterr().out


def test_equal_bits_are_equal_and_a_sign_of_zero_is_not():
    from megatron_agentrl.convert.compare import first_difference

    nan = torch.tensor([[float("nan"), 0.0]])
    assert first_difference(nan, nan.clone(), (1, 2)) is None
    assert first_difference(nan, nan.double(), (1, 2)) is None
    assert first_difference(torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [0.0, -0.0]]), (2, 2)).startswith("[1, 1]: 0 ")


def test_inspect_says_what_is_there_for_either_kind(tiny, tmp_path, capsys):
    hf_to_megatron(tiny("deepseek_v3"), tmp_path / "m", Cut(tp=2, pp=2, ep=4, etp=1), quiet=True)
    assert cli.inspect([str(tmp_path / "m")]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if not line.startswith(" "))
    rows = {key: value.strip() for key, value in rows.items()}
    assert rows["kind"] == "distributed checkpoint (torch_dist), converted" and rows["architecture"] == "deepseek_v3"
    assert rows["layers"] == "6: 3 latent attention, 1 MLP, 2 mixture of experts"
    assert rows["cut by"] == "tp=2 pp=2 cp=1 ep=4 etp=1 world=8"
    assert rows["prediction heads"] == "1, carried" and rows["optimizer state"] == "none"
    assert cli.inspect([str(tiny("deepseek_v3")), "--json", "--tensors"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["tensors"] == "169" and len(found["tensors"]) == 169
    assert {"name": "model.norm.weight", "shape": [96], "dtype": "bfloat16", "bytes": 192} in found["tensors"]
    total = sum(torch.Size(tensor["shape"]).numel() for tensor in found["tensors"])
    assert found["summary"]["parameters"] == f"{total:,}"


def test_help_has_examples_and_needs_no_torch():
    """From the tools' own folder too, where inspect.py must not stand in for the standard library's module."""
    for tool in ("hf_to_megatron", "megatron_to_hf", "verify", "inspect", "make_tiny"):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", f"{tool}.py", "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=TOOLS,
        )
        assert done.returncode == 0 and "examples:" in done.stdout, done.stderr[-500:]
        assert not any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())
