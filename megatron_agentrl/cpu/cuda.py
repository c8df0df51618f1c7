"""What megatron-core asks of `torch.cuda`, answered by the CPU.

megatron-core names the device in its source (`device="cuda"`, `torch.cuda.current_device()`, streams,
events, the CUDA generator). On a machine without CUDA each of these has one honest answer: the device is
the CPU, work is already in order, and the tracked random state is that of the CPU's generator. Used by
`cpu.megatron.install` only; never active where CUDA is present.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")

#: Factory functions that megatron-core calls with a CUDA device or pinned memory.
FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint",
             "empty_like", "zeros_like", "ones_like", "full_like")  # fmt: skip


def _on_cpu(device: Any) -> Any:
    """The CPU for any spelling of a CUDA device; anything else unchanged."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    return CPU if isinstance(device, str) and device.startswith("cuda") else device


def _redirected(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)  # pinning needs a CUDA driver; on a CPU it would buy nothing
        return factory(*args, **kwargs)

    return on_cpu


class InOrder:
    """A stream or an event where there is only one queue: every wait is already over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def record_event(self, event: Any = None) -> InOrder:
        return InOrder()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InOrder)

    def __hash__(self) -> int:
        return 0


def _nothing() -> Callable[..., None]:
    """A function that does nothing; a new one each time, because torch._dynamo keys its rules by identity."""
    return lambda *args, **kwargs: None


def _patch_streams(cuda: Any) -> None:
    stream = InOrder()
    cuda.Stream = cuda.Event = InOrder
    cuda.current_stream = lambda device=None: stream
    cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in ("synchronize", "empty_cache", "set_device", "set_stream", "reset_peak_memory_stats"):
        setattr(cuda, name, _nothing())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.is_current_stream_capturing = lambda: False
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _nothing())


def _patch_generator(cuda: Any) -> None:
    """The random-state tracker then forks and restores the CPU's generator, as it does CUDA's elsewhere."""

    def get(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state, module.manual_seed = get, put, seed


def _patch_tensors() -> None:
    # `with torch.device(...)` recognises factories by identity, in a list it makes once from torch's names:
    # made after the patch it would miss the real ones, and such a context would silently do nothing.
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))

    tensor: Any = torch.Tensor
    to, kind = tensor.to, tensor.type

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # megatron-core's optimizers sort parameters by comparing type names with "torch.cuda.FloatTensor".
        name = kind(self, *args, **kwargs)
        asks_for_name = not args and not kwargs
        if asks_for_name and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer"):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    tensor.to, tensor.type = moved, named
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = _nothing()


def install() -> None:
    """Answer megatron-core's CUDA calls on the CPU. Call once, before megatron-core is imported."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    _patch_streams(cuda)
    _patch_generator(cuda)
    _patch_tensors()
