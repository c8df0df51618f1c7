"""Makes megatron-core 0.19 run on a CPU with gloo: `install()`, before the first import of megatron.core.

megatron-core is written for CUDA, NCCL and Triton. Nothing of its mathematics is replaced here, with one
exception: the Mamba-2 kernels, which exist only in Triton (`cpu.mamba`). The rest is devices, collectives
whose NCCL form gloo does not take, and optional imports. Where CUDA is present `install` does nothing.
Only process entry points and tests call it.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_agentrl.cpu import cuda, mamba, packed

_installed = False


def install() -> bool:
    """Prepare this process to run megatron-core without CUDA.

    Returns True where the shim is active, False where CUDA is present (nothing was touched). Calling it
    again changes nothing.

    Raises:
        RuntimeError: megatron.core was imported before, so that it holds names this function would replace.
    """
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before megatron_agentrl.cpu.megatron.install(); "
            "call install() first in the process's entry point"
        )
    cuda.install()
    _provide_modules()
    _patch_collectives()
    _patch_megatron()
    packed.install()
    _installed = True
    return True


def _module(name: str, **attributes: Any) -> None:
    """Put a module of the given names where an import statement finds it."""
    module: Any = types.ModuleType(name)
    module.__dict__.update(attributes)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module


def _provide_modules() -> None:
    # Triton kernels for the paged stash: the one Triton import of megatron-core that is not guarded.
    _module(
        "megatron.core.transformer.moe.ops.paged_stash",
        GLOBAL_BLOCK_SIZE=1024,
        paged_stash_copy_kernel=None,
        paged_stash_pop_kernel=None,
    )
    _module("mamba_ssm", __version__="2.3.2")
    _module("mamba_ssm.ops")
    _module("mamba_ssm.ops.triton")
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=mamba.RMSNorm)
    _module(
        "mamba_ssm.ops.triton.ssd_combined",
        mamba_chunk_scan_combined=mamba.mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined=mamba.mamba_split_conv1d_scan_combined,
    )


def _patch_collectives() -> None:
    """NCCL takes shards of different sizes and tensors as split sizes; gloo takes neither."""
    all_gather, reduce_scatter, all_to_all = dist.all_gather, dist.reduce_scatter, dist.all_to_all_single

    def gather_any(tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        sizes = [out.shape[0] if out.dim() else 0 for out in tensor_list]
        if len(set(sizes)) == 1:
            return all_gather(tensor_list, tensor, group, async_op)
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in sizes]
        all_gather(gathered, padded, group)
        for out, whole, size in zip(tensor_list, gathered, sizes, strict=True):
            out.copy_(whole[:size])
        return None

    def scatter_any(
        output: torch.Tensor, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        sizes = [part.shape[0] for part in input_list]
        if len(set(sizes)) == 1:
            return reduce_scatter(output, input_list, op, group, async_op)
        whole = torch.cat(list(input_list))
        dist.all_reduce(whole, op, group)
        output.copy_(whole.split(sizes)[dist.get_rank(group)])
        return None

    def exchange(
        output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
        group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        def ints(sizes: Any) -> list[int] | None:
            return None if sizes is None else [int(size) for size in sizes]

        return all_to_all(output, input, ints(output_split_sizes), ints(input_split_sizes), group, async_op)

    dist.all_gather, dist.reduce_scatter, dist.all_to_all_single = gather_any, scatter_any, exchange  # type: ignore[assignment]


@contextlib.contextmanager
def _without_compile() -> Iterator[None]:
    compile, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile


class _NoFp8:
    """The state of FP8 where there is none."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _refill(released: torch.Tensor, computed: torch.Tensor) -> None:
    """Put the recomputed values into the storage that the forward pass gave up.

    Below the tensor, so that views see them and autograd's version counter does not move.
    """
    storage = computed.untyped_storage()
    released.untyped_storage().resize_(storage.nbytes())
    released.untyped_storage().copy_(storage)


def _patch_megatron() -> None:
    with warnings.catch_warnings(), _without_compile():
        # megatron-core warns once per optional package (apex, Transformer Engine, flashinfer, ...).
        warnings.simplefilter("ignore")
        # Its fusions are decorated with torch.compile while it is imported: 15 s of start-up and a C++
        # compiler, for nothing on a CPU. Modules imported later ask `jit_fuser`, which is switched off too.
        import megatron.core.jit

        megatron.core.jit.disable_jit_fuser()
        from megatron.core.models.hybrid import hybrid_model  # noqa: F401
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import token_dispatcher

    def set_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    # The tracker restores CUDA's generator through torch.cuda's private bindings; here it is the CPU's.
    random._set_cuda_rng_state = set_state
    # It then warns that the CPU generator moved inside a fork, which is the very thing being tracked.
    random.logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    # Without Transformer Engine these names are never bound, yet a checkpoint without output (selective recompute of
    # norms) asks them whether FP8 is on. It is not.
    random.FP8GlobalStateManager = _NoFp8
    random.activation_recompute_forward = lambda activation_recompute, recompute_phase: contextlib.nullcontext()
    random.fp8_autocast = lambda enabled, fp8_recipe: contextlib.nullcontext()
    # That recompute hands its result over by a C++ extension which it compiles on first use.
    random._share_storage_ext = types.SimpleNamespace(share_storage=_refill)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Only tensors on a GPU are turned into the numpy split sizes that the dispatcher goes on to use.
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
