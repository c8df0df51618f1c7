"""A host copy of the policy's weights, swapped in for a forward: the reference policy of the KL term.

The model keeps its place in memory; the present weights wait on the host meanwhile. Nothing is shared
between ranks: each copies its own shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model


def _tensors(models: list[Any]) -> list[torch.Tensor]:
    """Parameters and the routers' expert biases (buffers that take part in the forward)."""
    found: list[torch.Tensor] = []
    for chunk in models:
        found += [parameter.data for parameter in get_attr_wrapped_model(chunk, "parameters")()]
        found += [
            module.expert_bias
            for module in get_attr_wrapped_model(chunk, "modules")()
            if getattr(module, "expert_bias", None) is not None
        ]
    return found


class Reference:
    """The weights as they were when this was made.

    `with reference.active(models): ...` runs with them; on leaving, the present weights are back bit for
    bit, also after an error. Inside, nothing may train: the optimizer would step from the wrong weights.
    """

    def __init__(self, models: list[Any]) -> None:
        self._kept = [tensor.detach().to("cpu", copy=True) for tensor in _tensors(models)]

    @contextmanager
    def active(self, models: list[Any]) -> Iterator[None]:
        """Swap the reference in; swap the present weights back at the end.

        Raises:
            ValueError: the model holds another number of tensors than the reference was taken from.
        """
        live = _tensors(models)
        if len(live) != len(self._kept):
            raise ValueError(f"the reference holds {len(self._kept)} tensors, the model {len(live)}")
        present = [tensor.detach().to("cpu", copy=True) for tensor in live]
        with torch.no_grad():
            torch._foreach_copy_(live, self._kept)
            try:
                yield
            finally:
                torch._foreach_copy_(live, present)

    def tensors(self) -> list[torch.Tensor]:
        """The kept tensors, to be written into a checkpoint."""
        return self._kept
