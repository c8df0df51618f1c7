"""vLLM on a machine without CUDA: what stock vLLM gets wrong or slow there, repaired in one place.

`register` is a vLLM general plugin (entry point in pyproject.toml), so vLLM calls it in each of its processes before a
model exists. It does nothing where CUDA is present, and nothing the second time. Each repair names the vLLM code it
stands in for; they were written against vLLM 0.32.0. Nothing here is imported by the trainer.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

#: Set by the launcher of our own engines: fork vLLM's engine process instead of spawning it.
FORK_ENV = "MEGATRON_AGENTRL_FORK_ENGINE"

_registered = False


def register() -> None:
    """Installs the repairs in this process (vLLM general plugin)."""
    global _registered
    if _registered or torch.cuda.is_available():
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    _registered = True
    _prepack_experts_on_every_load()
    _add_ungated_experts()
    _refresh_tied_heads()
    _leave_generator_offsets_alone()
    _convolve_prompts_at_once()
    if os.environ.get(FORK_ENV) == "1":
        _fork_engine_process(type(current_platform))


def import_model_class(folder: str) -> None:
    """Imports the vLLM class of the model in `folder` into this process.

    vLLM otherwise inspects it in a subprocess, so as not to touch CUDA; that subprocess imports vLLM anew.
    """
    from vllm import ModelRegistry

    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures", []):
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def _prepack_experts_on_every_load() -> None:
    """A reload must pack the experts again.

    `UnquantizedFusedMoEMethod._setup_kernel` packs only while `moe_kernel` is None, and on a reload copies the plain
    weights over the packed ones: logprobs are then silently wrong by nats. Forgetting the kernel makes each load like
    the first. (The reason to keep it, addresses captured in CUDA graphs, does not exist on a CPU.)
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    stock = UnquantizedFusedMoEMethod.process_weights_after_loading

    @functools.wraps(stock)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        self.moe_kernel = None
        stock(self, layer)

    UnquantizedFusedMoEMethod.process_weights_after_loading = process_weights_after_loading  # type: ignore[method-assign]


def _add_ungated_experts() -> None:
    """Experts without a gate (Nemotron-H's relu²) are refused on a CPU: vLLM has kernels for gated ones only.

    `FusedMoEConfig.__post_init__` raises as its last statement, so dropping that one error leaves a complete config;
    the backend list for CPUs gets an expert class in plain torch, asked only for ungated experts.
    """
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

    stock_post_init = moe_config.FusedMoEConfig.__post_init__

    @functools.wraps(stock_post_init)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            stock_post_init(self, *args, **kwargs)
        except NotImplementedError as error:
            if "is_act_and_mul=False" not in str(error):
                raise

    class UngatedExperts(CPUUnquantizedExperts):
        """relu² experts on plain (unpacked) weights: w1_EFH, w2_EHF."""

        @staticmethod
        def is_supported_config(
            cls: type, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
        ) -> tuple[bool, str | None]:
            if moe_config.is_act_and_mul or moe_config.activation != MoEActivation.RELU2_NO_MUL:
                return False, "only experts with an ungated relu² activation"
            if weight_key is not None or activation_key is not None:
                return False, "only unquantized weights"
            if moe_config.moe_parallel_config.use_ep:
                return False, "no expert parallelism on a CPU"
            for size in (moe_config.hidden_dim, moe_config.intermediate_size_per_partition):
                if size * moe_config.in_dtype.itemsize % 16:
                    return False, f"grouped products need rows of a multiple of 16 bytes, found {size} elements"
            return True, None

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return True

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            pass  # used as loaded

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            global_num_experts: int,
            expert_map: torch.Tensor | None,
            a1q_scale: torch.Tensor | None,
            a2_scale: torch.Tensor | None,
            workspace13: torch.Tensor,
            workspace2: torch.Tensor,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            weights = None if apply_router_weight_on_input else topk_weights
            output.copy_(relu2_experts(hidden_states, w1, w2, topk_ids, weights))

    stock_kernels = oracle.backend_to_kernel_cls

    @functools.wraps(stock_kernels)
    def backend_to_kernel_cls(backend: Any) -> list[type]:
        kernels = stock_kernels(backend)
        return [*kernels, UngatedExperts] if backend == oracle.UnquantizedMoeBackend.CPU else kernels

    moe_config.FusedMoEConfig.__post_init__ = post_init  # type: ignore[method-assign]
    oracle.backend_to_kernel_cls = backend_to_kernel_cls


def relu2_experts(
    x_TH: torch.Tensor,
    w1_EFH: torch.Tensor,
    w2_EHF: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
) -> torch.Tensor:
    """Σ_k weight_tk · w2[e] · relu(w1[e] · x_t)² with e = ids_tk, as y_TH. weights_TK None means weights of 1.

    Rows are sorted by expert, so that each projection is one grouped matrix product over T·K rows.
    """
    tokens, top_k = ids_TK.shape
    ids = ids_TK.reshape(-1).long()
    order = torch.argsort(ids, stable=True)
    ends_E = torch.bincount(ids, minlength=w1_EFH.shape[0]).cumsum(0).to(torch.int32)
    h = F.grouped_mm(x_TH[order // top_k], w1_EFH.transpose(1, 2), offs=ends_E).relu_().square_()
    sorted_y = F.grouped_mm(h, w2_EHF.transpose(1, 2), offs=ends_E)
    y_TKH = torch.empty_like(sorted_y).index_copy_(0, order, sorted_y).view(tokens, top_k, -1)
    if weights_TK is None:
        return y_TKH.sum(1)
    return torch.bmm(weights_TK.to(y_TKH.dtype).unsqueeze(1), y_TKH).squeeze(1)


def _refresh_tied_heads() -> None:
    """A head tied to the embedding keeps an old packed copy after a reload.

    On a CPU `lm_head` multiplies with weights packed at load time. A reload loads the embedding only, so the head
    reports "Failed to load weights", gets its shared parameter back, and goes on with the old packed copy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise

    stock = layerwise.finalize_layerwise_processing

    @functools.wraps(stock)
    def finalize_layerwise_processing(model: torch.nn.Module, model_config: Any) -> None:
        stock(model, model_config)
        modules = list(model.modules())
        embeddings = [m for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
        for head in modules:
            if isinstance(head, ParallelLMHead) and any(head.weight is e.weight for e in embeddings):
                head.quant_method.process_weights_after_loading(head)

    layerwise.finalize_layerwise_processing = finalize_layerwise_processing


def _leave_generator_offsets_alone() -> None:
    """A per-request seed kills the engine when a chunked prefill discards a sample.

    `GPUModelRunner._bookkeeping_sync` then rewinds the request's generator by its Philox offset, which a CPU generator
    does not have. Without the rewind the draw is merely not repeated, so only a seed's reproducibility across chunked
    prefills is lost. Bookkeeping uses the generators for nothing else.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock = CPUModelRunner._bookkeeping_sync

    @functools.wraps(stock)
    def bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return stock(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    CPUModelRunner._bookkeeping_sync = bookkeeping_sync  # type: ignore[method-assign]


def _convolve_prompts_at_once() -> None:
    """Mamba's convolution over prompts is a Python loop over sequences. Layers hold it by name, some of them already."""
    from vllm.model_executor.layers.mamba.ops import causal_conv1d

    from megatron_agentrl.cpu.conv1d import packed_causal_conv1d

    stock = causal_conv1d.causal_conv1d_fn
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(module, "causal_conv1d_fn", None) is stock:
            module.causal_conv1d_fn = packed_causal_conv1d  # type: ignore[attr-defined]


def _fork_engine_process(platform: type) -> None:
    """Start the engine process by fork: it then need not import vLLM again, which takes longer than all else.

    `CpuPlatform.check_and_update_config` forces spawn, so that the child loads libraries named in LD_PRELOAD and binds
    its OpenMP threads; our launcher sets both in the environment that the parent already started with. Forking is
    sound because the parent has run no parallel region.
    """
    stock = platform.check_and_update_config.__func__  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[attr-defined]
