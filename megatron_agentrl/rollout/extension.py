"""What runs inside vLLM's workers: receiving a policy version beside generation, and installing it.

vLLM mixes `WorkerExtension` into its worker class, and creates `StagedWeights` as the worker's weight-transfer
backend (importing this module registers it). Reception runs in a thread with a communicator of its own; only the
install, for which the publisher pauses generation, touches the model. Installing goes through vLLM's layerwise reload:
each layer is loaded into unprocessed parameters, post-processed as at start-up, and copied into its live storage.
"""

from __future__ import annotations

import threading
import time
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
from megatron_agentrl.weights.engine import Staging
from megatron_agentrl.weights.manifest import Manifest
from megatron_agentrl.weights.stream import ManifestError, Receiver, StreamAborted
from megatron_agentrl.weights.transport import GlooChannel, Rendezvous, TransportError


@dataclass
class NoInit(WeightTransferInitInfo):
    """Channels are opened by `begin`, in the staging thread; vLLM's own hook for it would block generation."""


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
        self._channel: GlooChannel | None = None
        self._thread: threading.Thread | None = None
        self._receiver: Receiver | None = None
        self._manifest: Manifest | None = None
        self._status = Staging("idle")

    # ---- receiving (beside generation) ---------------------------------------------------------------------------

    def begin(self, version: int, manifest: Manifest | None, rendezvous: Rendezvous | None, seconds: float) -> None:
        """Starts the staging thread. `manifest` None repeats the last one."""
        if self._thread is not None and self._thread.is_alive():
            if rendezvous is None:
                raise RuntimeError(f"version {self._status.version} is still being received")
            self._close_channel()  # a new rendezvous means the trainer gave the old channel up
            self._thread.join(timeout=5)
            if self._thread.is_alive():
                raise RuntimeError("the previous reception does not end")
        self._manifest = manifest or self._manifest
        if self._manifest is None:
            raise RuntimeError("no manifest was ever sent to this engine")
        if self._channel is None and rendezvous is None:
            raise RuntimeError("this engine has no channel to the trainer; publish with a new rendezvous")
        self._receiver = Receiver(self._manifest)
        self._status = Staging("receiving", version, expected=len(self._manifest.tensors))
        deadline = time.monotonic() + seconds
        self._thread = threading.Thread(
            target=self._receive, args=(self._receiver, version, rendezvous, deadline), name="weights", daemon=True
        )
        self._thread.start()

    def _receive(self, receiver: Receiver, version: int, rendezvous: Rendezvous | None, deadline: float) -> None:
        state, error = "complete", ""
        try:
            if rendezvous is not None:
                self._close_channel()
                self._channel = GlooChannel(rendezvous, 1 + self.parallel_config.rank, deadline)
            assert self._channel is not None
            receiver.receive(self._channel, deadline)
        except (StreamAborted, ManifestError) as problem:
            state, error = "failed", str(problem)
        except TransportError as problem:
            state, error = "failed", str(problem)
            self._close_channel()
        self._status = self._as_status(receiver, state, version, error)

    @staticmethod
    def _as_status(receiver: Receiver, state: str, version: int | None, error: str) -> Staging:
        return Staging(state, version, len(receiver.tensors), len(receiver.manifest.tensors), receiver.nbytes, error)

    def status(self) -> Staging:
        now = self._status
        if now.state == "receiving" and self._receiver is not None:
            return self._as_status(self._receiver, now.state, now.version, "")
        return now

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()

    # ---- installing (paused) -------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: NoInit) -> None:
        raise NotImplementedError("channels are opened when staging begins")

    def start_weight_update(self) -> None:
        if self._status.state != "complete":
            raise RuntimeError(f"nothing to install: staging is {self._status.state} {self._status.error}")
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the staged tensors. (The base class would call an accelerator API that a CPU does not have.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Install) -> None:
        receiver, self._receiver = self._receiver, None
        staged, self._status = self._status, Staging("idle")
        try:
            if receiver is None or staged.state != "complete" or staged.version != update_info.version:
                raise RuntimeError(f"asked to install version {update_info.version}, staged is {staged}")
            model: Any = self.model
            self._require_loaded(model.load_weights(receiver.tensors.items()))
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
        self._close_channel()


class WorkerExtension:
    """Mixed into vLLM's worker: methods the publisher calls through `/collective_rpc`. Arguments are JSON text."""

    weight_transfer_engine: StagedWeights

    def stage_begin(self, request: str) -> None:
        asked = msgspec.json.decode(request, type=BeginStaging)
        self.weight_transfer_engine.begin(asked.version, asked.manifest, asked.rendezvous, asked.seconds)

    def stage_status(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.weight_transfer_engine.status())


class BeginStaging(msgspec.Struct):
    version: int
    seconds: float
    manifest: Manifest | None = None
    rendezvous: Rendezvous | None = None


if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, StagedWeights)
