"""A module with just the parameters that a layout names: what weights look like to `weights_io`, without a model."""

from __future__ import annotations

import torch

from megatron_agentrl.layout.megatron import Coordinates, parameter_layouts


class Shell(torch.nn.Module):
    """Holds parameters at dotted names."""

    def put(self, name: str, tensor: torch.Tensor, buffer: bool = False) -> None:
        module: torch.nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        if buffer:
            module.register_buffer(last, tensor)
        else:
            module.register_parameter(last, torch.nn.Parameter(tensor))


def shells(config, at: Coordinates, fill: float = float("nan"), dtype=torch.float32) -> list[Shell]:
    """One shell per model chunk of the rank at `at`, every element `fill`."""
    found = [Shell() for _ in (at.chunks or (0,))]
    for layout in parameter_layouts(config, at):
        tensor = torch.full(layout.shape, fill, dtype=dtype)
        found[layout.chunk].put(layout.name, tensor, buffer=layout.name.endswith("expert_bias"))
    return found
