"""What a publish carries: the tensors' names, shapes and types, in the order in which they travel."""

from __future__ import annotations

import math

import msgspec
import torch


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor, by its name in the engine's checkpoint format (Hugging Face names). `dtype` as in torch, `float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.name}: {self.dtype!r} is not a torch dtype")
        return dtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class Manifest(msgspec.Struct, frozen=True):
    """All tensors of a policy version, each name once."""

    tensors: tuple[TensorInfo, ...]

    def __post_init__(self) -> None:
        names = [info.name for info in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"manifest names tensors more than once: {', '.join(twice[:5])}")

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors)
