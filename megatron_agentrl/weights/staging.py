"""The engine's side of staging: a thread that receives a version beside generation. Knows no engine in particular."""

from __future__ import annotations

import threading
import time

import msgspec
import torch

from megatron_agentrl.weights.engine import Staging
from megatron_agentrl.weights.manifest import Manifest
from megatron_agentrl.weights.stream import ManifestError, Receiver, StreamAborted
from megatron_agentrl.weights.transport import Channel, GlooChannel, Rendezvous, TransportError


class BeginStaging(msgspec.Struct):
    """The request that starts it. `manifest` None: as last time; `rendezvous` None: over the channel there is."""

    version: int
    seconds: float
    manifest: Manifest | None = None
    rendezvous: Rendezvous | None = None


class StagingArea:
    """Holds at most one received version, in host memory, until it is taken. One thread may use it (and has its own)."""

    def __init__(self, rank: int) -> None:
        """`rank` is this worker's in the channel: 1 + its tensor-parallel rank."""
        self._rank = rank
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._receiver: Receiver | None = None
        self._manifest: Manifest | None = None
        self._status = Staging("idle")

    def begin(self, request: BeginStaging) -> None:
        """Starts the thread. Raises RuntimeError when the request cannot be met as things stand."""
        if self._thread is not None and self._thread.is_alive():
            if request.rendezvous is None:
                raise RuntimeError(f"version {self._status.version} is still being received")
            self.close()  # a new rendezvous means the trainer gave the old channel up
            self._thread.join(timeout=5)
            if self._thread.is_alive():
                raise RuntimeError("the previous reception does not end")
        self._manifest = request.manifest or self._manifest
        if self._manifest is None:
            raise RuntimeError("no manifest was ever sent to this engine")
        if self._channel is None and request.rendezvous is None:
            raise RuntimeError("this engine has no channel to the trainer; publish with a new rendezvous")
        self._receiver = Receiver(self._manifest)
        self._status = Staging("receiving", request.version, expected=len(self._manifest.tensors))
        deadline = time.monotonic() + request.seconds
        self._thread = threading.Thread(
            target=self._receive, args=(self._receiver, request, deadline), name="weights", daemon=True
        )
        self._thread.start()

    def _receive(self, receiver: Receiver, request: BeginStaging, deadline: float) -> None:
        state, error = "complete", ""
        try:
            if request.rendezvous is not None:
                self.close()
                self._channel = GlooChannel(request.rendezvous, self._rank, deadline)
            if self._channel is None:
                raise TransportError("the channel was closed")
            receiver.receive(self._channel, deadline, before_answer=lambda: self._complete(receiver, request.version))
            return
        except (StreamAborted, ManifestError) as problem:
            state, error = "failed", str(problem)
        except TransportError as problem:
            state, error = "failed", str(problem)
            self.close()
        self._status = _status(receiver, state, request.version, error)

    def _complete(self, receiver: Receiver, version: int) -> None:
        # Before the trainer hears of it, since its next call is the install.
        self._status = _status(receiver, "complete", version, "")

    def status(self) -> Staging:
        now = self._status
        if now.state == "receiving" and self._receiver is not None:
            return _status(self._receiver, now.state, now.version, "")
        return now

    def require(self) -> None:
        """Raises RuntimeError, saying what there is, unless a version is complete."""
        if self._status.state != "complete":
            raise RuntimeError(f"nothing to install: staging is {self._status.state} {self._status.error}".strip())

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """The staged tensors by name; they are given up here. Raises RuntimeError when `version` is not what is staged."""
        self.require()
        receiver, self._receiver = self._receiver, None
        staged, self._status = self._status, Staging("idle")
        if receiver is None or staged.version != version:
            raise RuntimeError(f"asked to install version {version}, staged is {staged.version}")
        return receiver.tensors

    def close(self) -> None:
        """Drops the channel; a reception under way ends with an error."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()


def _status(receiver: Receiver, state: str, version: int | None, error: str) -> Staging:
    return Staging(state, version, len(receiver.tensors), len(receiver.manifest.tensors), receiver.nbytes, error)
