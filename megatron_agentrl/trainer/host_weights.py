"""Weights that wait in the host's memory and take the model's place for a forward pass.

The model keeps its storage: tensor by tensor, what is here and what waits change places, and back. So the host
holds each set of weights once, the device one tensor more, and nothing is shared between ranks: each keeps its own
shards. Optimizer state (float32 masters among it) is never touched. FP8 weights, whose bytes mean nothing without
their scales, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_agentrl.trainer.data_parallel import settle
from megatron_agentrl.trainer.optimizer import routers


class HostWeights:
    """The weights of the model chunks as they were when this was made: a copy, pinned where there is a GPU.

    `with weights.active(models): ...` runs with them; on leaving, the model's own are back bit for bit, also after an
    error. Inside, nothing may train: the optimizer would step from the wrong weights. Collective, like making one:
    parameters that are still being gathered are waited for first.

    Raises:
        ValueError: the model holds FP8 weights.
    """

    def __init__(self, models: list[Any]) -> None:
        settle(models)
        self._waiting = [to_host(tensor) for tensor in _tensors(models)]
        _synchronize()

    @classmethod
    def loaded(cls, models: list[Any], load: Callable[[], None]) -> HostWeights:
        """The weights that `load` puts into the models, which then hold what they held before. Collective.

        An exception of `load` passes on and leaves the models with what it had written.
        """
        made = cls(models)
        load()
        _exchange(_tensors(models), made._waiting)
        return made

    @contextmanager
    def active(self, models: list[Any]) -> Iterator[None]:
        """Swap these weights in, and the model's own back at the end.

        Raises:
            ValueError: the model's tensors are not those that the weights were taken from.
        """
        settle(models)
        live = _tensors(models)
        shapes = [(tensor.shape, tensor.dtype) for tensor in live]
        if shapes != [(tensor.shape, tensor.dtype) for tensor in self._waiting]:
            raise ValueError(
                f"the weights on the host are {len(self._waiting)} tensors of another model than the {len(live)} given"
            )
        scaling = [(tensor, tensor.clone()) for tensor in _scaling(models)]
        _exchange(live, self._waiting)
        try:
            yield
        finally:
            _exchange(live, self._waiting)
            for tensor, before in scaling:
                tensor.copy_(before)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for tensor in self._waiting)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, pinned where there is a GPU. Synchronise before its values are read there."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available(), requires_grad=False)
    return copy.copy_(tensor.detach(), non_blocking=True)


def _tensors(models: list[Any]) -> list[torch.Tensor]:
    """Parameters, each once, and the routers' expert biases (buffers that take part in the forward)."""
    found = []
    for chunk in models:
        for name, parameter in get_attr_wrapped_model(chunk, "named_parameters")():
            if type(parameter.data) is not torch.Tensor:
                raise ValueError(
                    f"{name} is a {type(parameter.data).__name__}: FP8 weights cannot be swapped exactly; set "
                    "precision.fp8_param_gather=false"
                )
            found.append(parameter.data)
    return found + [router.expert_bias for router in routers(models)]


def _scaling(models: list[Any]) -> list[torch.Tensor]:
    """Scales and amax histories of FP8 with delayed scaling: Transformer Engine keeps them by module, and a forward
    pass with other weights would leave its maxima in them. Empty for any other recipe."""
    return [
        tensor
        for chunk in models
        for module in get_attr_wrapped_model(chunk, "modules")()
        for which in ("scaling_fwd", "scaling_bwd")
        for name in ("scale", "amax_history")
        if (tensor := getattr(getattr(module, "fp8_meta", {}).get(which), name, None)) is not None
    ]


@torch.no_grad()
def _exchange(live: list[torch.Tensor], waiting: list[torch.Tensor]) -> None:
    """Each pair changes its values, with one tensor's memory on the device besides. In order on one stream."""
    for here, there in zip(live, waiting, strict=True):
        arriving = there.to(here.device, copy=True, non_blocking=True)
        there.copy_(here, non_blocking=True)
        here.copy_(arriving, non_blocking=True)
    _synchronize()


def _synchronize() -> None:
    """Copies to pinned memory are done when this returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
