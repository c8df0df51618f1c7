"""What runs inside vLLM's workers: receiving a policy version beside generation, and installing it.

vLLM mixes `WorkerExtension` into its worker class, and creates `StagedWeights` as the worker's weight-transfer
backend (importing this module registers it). Reception runs in a thread with a communicator of its own; only the
install, for which the publisher pauses generation, touches the model. Installing goes through vLLM's layerwise reload:
each layer is loaded into unprocessed parameters, post-processed as at start-up, and copied into its live storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from megatron_agentrl.rollout.engine import TRANSFER_BACKEND
from megatron_agentrl.weights.staging import BeginStaging, StagingArea
from megatron_agentrl.weights.stream import ManifestError


@dataclass
class NoInit(WeightTransferInitInfo):
    """Channels are opened by the staging thread; vLLM's own hook for it would block generation."""


@dataclass
class Install(WeightTransferUpdateInfo):
    version: int


class StagedWeights(WeightTransferEngine[NoInit, Install]):
    """Receives into host memory, then loads from there."""

    init_info_cls = NoInit
    update_info_cls = Install
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        if vllm_config.parallel_config.enable_eplb:
            raise ValueError("expert load balancing (EPLB) moves experts that a reload then misplaces; turn it off")
        self.staging = StagingArea(1 + vllm_config.parallel_config.rank)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        raise NotImplementedError("channels are opened when staging begins")

    def start_weight_update(self) -> None:
        self.staging.require()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the staged tensors. (The base class would call an accelerator API that a CPU does not have.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Install) -> None:
        model: Any = self.model
        try:
            self._require_loaded(model.load_weights(self.staging.take(update_info.version).items()))
        except BaseException:
            self._leave_reload()
            raise

    def _require_loaded(self, loaded: set[str] | None) -> None:
        """vLLM only logs a parameter that no tensor was for. Raises ManifestError instead."""
        if loaded is None:
            raise RuntimeError(f"{type(self.model).__name__}.load_weights does not say what it loaded")
        tied = {
            f"{name}.weight"
            for name, module in self.model.named_modules()
            if isinstance(module, ParallelLMHead) and self.model_config.hf_text_config.tie_word_embeddings
        }
        missing = sorted({name for name, _ in self.model.named_parameters()} - loaded - tied)
        if missing:
            raise ManifestError(f"no tensor of the manifest fills {len(missing)} parameters: {', '.join(missing[:5])}")

    def _leave_reload(self) -> None:
        """Puts back the live storage of layers that were not finished, so that the next reload starts clean."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
                info.reset()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.staging.close()


class WorkerExtension:
    """Mixed into vLLM's worker: methods the publisher calls through `/collective_rpc`. Arguments are JSON text."""

    weight_transfer_engine: StagedWeights

    def stage_begin(self, request: str) -> None:
        self.weight_transfer_engine.staging.begin(msgspec.json.decode(request, type=BeginStaging))

    def stage_status(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.weight_transfer_engine.staging.status())


if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, StagedWeights)
