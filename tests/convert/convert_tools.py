"""What several tests of conversion share: reading folders with the safetensors library, and starting the tools."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from megatron_agentrl.convert.tiny import CONFIGS

ARCHITECTURES = tuple(CONFIGS)


def tensors(folder):
    """Every tensor of a folder, as the safetensors library reads it."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not found.keys() & part.keys()
        found |= part
    return found


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


def remark(checkpoint):
    """Write the mark again after a file was changed on purpose."""
    path = checkpoint / "complete.json"
    mark = json.loads(path.read_text())
    mark["files"] = {name: (checkpoint / name).stat().st_size for name in mark["files"]}
    path.write_text(json.dumps(mark))
