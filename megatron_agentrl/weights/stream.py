"""The order of messages on a channel that carry one policy version, and both ends of it.

The trainer packs tensors, in manifest order, into frames of some megabytes, so that many small tensors cost one
message and only one frame is held beside the tensor being gathered. Each frame is announced by a header of four
int64: kind, index of its first tensor, number of tensors, bytes of its body.

    DATA   body: the tensors' bytes, each beginning at a multiple of 16
    END    body: one CRC-32 per tensor of the manifest, as int64
    ABORT  no body: the trainer gives this version up; the channel stays usable

After END each worker answers with two int64: 1 or 0 (all tensors there and intact), and how many are.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from megatron_agentrl.weights.manifest import Manifest, TensorInfo
from megatron_agentrl.weights.transport import Channel, Pending, TransportError

DATA, END, ABORT = 0, 1, 2
FRAME_BYTES = 32 << 20
_ALIGNMENT = 16


class ManifestError(ValueError):
    """The tensors that came are not the ones the manifest announced."""


class StreamAborted(RuntimeError):
    """The trainer gave the version up while it was being staged."""


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat uint8 tensor (contiguous, CPU)."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def crc32(data: torch.Tensor) -> int:
    """CRC-32 of a flat uint8 tensor."""
    return zlib.crc32(data.numpy())  # type: ignore[arg-type]


@dataclass
class Sender:
    """The trainer's end towards several replicas at once. A replica that fails is dropped; the others go on.

    So is one that takes more than half of the time that is left for a single message: a replica that hangs must not
    use up the deadline of those that do not. `channels` and `failures` are by replica name.
    """

    manifest: Manifest
    channels: dict[str, Channel]
    deadline: float
    frame_bytes: int = FRAME_BYTES
    failures: dict[str, TransportError] = field(default_factory=dict)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sends a whole version, consuming `tensors` one at a time even when no replica is left to receive it.

        Raises ManifestError for a tensor that is missing, unknown, out of order or of another shape or type, and
        whatever the iterator raises; in both cases the replicas are first told to drop what they have.
        """
        try:
            self._send(tensors)
        except Exception:
            self._post(ABORT, 0, 0, None)
            raise

    def _send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        crcs: list[int] = []
        whole = sum(_padded(info.nbytes) for info in self.manifest.tensors)
        frame = torch.zeros(min(self.frame_bytes, whole), dtype=torch.uint8)
        first = count = size = 0
        for info, data in _checked(self.manifest, tensors):
            if count and size + _padded(info.nbytes) > frame.numel():
                self._post(DATA, first, count, frame[:size])
                first, count, size = first + count, 0, 0
            if _padded(info.nbytes) > frame.numel():
                frame = torch.zeros(_padded(info.nbytes), dtype=torch.uint8)
            frame[size : size + info.nbytes] = data
            crcs.append(crc32(data))
            count, size = count + 1, size + _padded(info.nbytes)
        if count:
            self._post(DATA, first, count, frame[:size])
        self._post(END, len(crcs), 0, torch.tensor(crcs, dtype=torch.int64))

    def _post(self, kind: int, first: int, count: int, body: torch.Tensor | None) -> None:
        raw = None if body is None else body.view(torch.uint8)
        header = torch.tensor([kind, first, count, 0 if raw is None else raw.numel()], dtype=torch.int64)
        for message in [header, *([raw] if raw is not None and raw.numel() else [])]:
            pending: list[tuple[str, Pending]] = []
            for name, channel in self.channels.items():
                if name not in self.failures:
                    try:
                        pending.append((name, channel.broadcast(message, self.deadline)))
                    except TransportError as error:
                        self.failures[name] = error
            for name, transfer in pending:
                try:
                    transfer.wait(self._patience())
                except TransportError as error:
                    self.failures[name] = error

    def _patience(self) -> float:
        now = time.monotonic()
        return now + (self.deadline - now) / 2

    def acknowledged(self) -> dict[str, list[tuple[bool, int]]]:
        """Answers of the replicas that are left, one (intact, tensors received) per worker."""
        answers: dict[str, list[tuple[bool, int]]] = {}
        for name, channel in self.channels.items():
            if name in self.failures:
                continue
            try:
                for worker in range(1, channel.size):
                    answer = torch.zeros(2, dtype=torch.int64)
                    channel.receive(answer, worker, self._patience())
                    answers.setdefault(name, []).append((bool(answer[0]), int(answer[1])))
            except TransportError as error:
                self.failures[name] = error
                answers.pop(name, None)
        return answers


def _checked(
    manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterable[tuple[TensorInfo, torch.Tensor]]:
    """Each tensor's bytes, compared with its manifest entry as it comes."""
    expected = iter(manifest.tensors)
    for name, tensor in tensors:
        info = next(expected, None)
        if info is None:
            raise ManifestError(f"tensor {name} came after the last one of the manifest ({len(manifest.tensors)})")
        found = TensorInfo.of(name, tensor)
        if found != info:
            raise ManifestError(f"tensor {found} came where the manifest has {info}; list both in the same order")
        yield info, as_bytes(tensor)
    missing = [info.name for info in expected]
    if missing:
        raise ManifestError(f"{len(missing)} tensors of the manifest never came, the first is {missing[0]}")


class Receiver:
    """A worker's end: collects one version and says whether it is whole. Tensors are views into the frames."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.tensors: dict[str, torch.Tensor] = {}
        self.nbytes = 0

    def receive(self, channel: Channel, deadline: float, before_answer: Callable[[], None] = lambda: None) -> None:
        """Blocks until the version is whole and acknowledged; `before_answer` is called between the two.

        Raises StreamAborted, TransportError, or ManifestError (incomplete or damaged; the trainer is told).
        """
        crcs: list[int] = []
        while True:
            header = torch.zeros(4, dtype=torch.int64)
            channel.broadcast(header, deadline).wait(deadline)
            kind, first, count, nbytes = header.tolist()
            if kind == ABORT:
                raise StreamAborted(f"the trainer gave up after {len(crcs)} of {len(self.manifest.tensors)} tensors")
            body = torch.empty(nbytes, dtype=torch.uint8)
            if nbytes:
                channel.broadcast(body, deadline).wait(deadline)
            if kind == END:
                break
            self._take(first, count, body, crcs)
        problem = self._problem(crcs, body.view(torch.int64).tolist())
        if problem is None:
            before_answer()
        channel.send(torch.tensor([int(problem is None), len(self.tensors)], dtype=torch.int64), 0, deadline)
        if problem is not None:
            raise ManifestError(problem)

    def _take(self, first: int, count: int, body: torch.Tensor, crcs: list[int]) -> None:
        offset = 0
        for info in self.manifest.tensors[first : first + count]:
            data = body[offset : offset + info.nbytes]
            crcs.append(crc32(data))
            self.tensors[info.name] = data.view(info.torch_dtype).view(info.shape)
            offset += _padded(info.nbytes)
        self.nbytes += body.numel()

    def _problem(self, found: list[int], sent: list[int]) -> str | None:
        missing = [info.name for info in self.manifest.tensors if info.name not in self.tensors]
        if missing:
            return f"{len(missing)} of {len(self.manifest.tensors)} tensors are missing, the first is {missing[0]}"
        damaged = [info.name for info, a, b in zip(self.manifest.tensors, found, sent, strict=True) if a != b]
        return f"{len(damaged)} tensors arrived damaged, the first is {damaged[0]}" if damaged else None
