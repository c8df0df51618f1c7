"""How bytes get from the trainer to one engine replica: a communicator that belongs to that replica alone.

`Channel` is what the stream (weights/stream.py) needs of a transport. `GlooChannel` is the one for CPUs and for any
network that gloo speaks. Neither touches torch.distributed's default group, so that an engine that dies takes nothing
of the trainer's own communication with it. Rank 0 is the trainer; ranks 1 … size−1 are the replica's workers.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

#: How often gloo tries to connect to a peer, each time for as long as its timeout says.
_CONNECT_ATTEMPTS = 5


class TransportError(RuntimeError):
    """The other side is gone, or did not do its part before the deadline. The channel is unusable."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where a channel's members meet: a key-value store that rank 0 hosts, and a prefix no other channel uses."""

    host: str
    port: int
    prefix: str
    size: int


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, deadline: float) -> None:
        """Returns when this side's part is done. Raises TransportError after `deadline` (time.monotonic seconds)."""
        ...


class Channel(Protocol):
    """Moves CPU tensors between the trainer and the workers of one replica, in the same order on every member.

    Every wait ends at `deadline`, in seconds of time.monotonic. After a TransportError the channel must be aborted.
    """

    rank: int
    size: int

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> Pending:
        """Starts to copy the contiguous `tensor` of rank 0 into that of every other rank."""
        ...

    def send(self, tensor: torch.Tensor, to: int, deadline: float) -> None: ...

    def receive(self, tensor: torch.Tensor, source: int, deadline: float) -> None: ...

    def abort(self) -> None:
        """Drops the connections. Waits of this side end with an error; the other side sees a closed connection."""
        ...


class Transport(Protocol):
    """Makes channels on the trainer's side."""

    def invite(self, name: str, size: int) -> Rendezvous:
        """A fresh meeting place for the replica `name`."""
        ...

    def open(self, rendezvous: Rendezvous, rank: int, deadline: float) -> Channel:
        """Joins; returns when all `rendezvous.size` members have."""
        ...


class GlooTransport:
    """Hosts the store on the trainer's side. `port` 0 picks a free one."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self._store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._generation = 0

    def invite(self, name: str, size: int) -> Rendezvous:
        self._generation += 1
        return Rendezvous(self.host, self._store.port, f"weights/{name}/{self._generation}", size)

    def open(self, rendezvous: Rendezvous, rank: int, deadline: float) -> Channel:
        return GlooChannel(rendezvous, rank, deadline)


class GlooChannel:
    """A ProcessGroupGloo of one replica and the trainer, outside torch.distributed's registry."""

    def __init__(self, rendezvous: Rendezvous, rank: int, deadline: float) -> None:
        self.rank = rank
        self.size = rendezvous.size
        try:
            # A client of its own: torch's store client is locked while it waits, so that on a shared one a replica
            # that is late would hold up all others.
            client = dist.TCPStore(
                rendezvous.host, rendezvous.port, is_master=False, timeout=_remaining(deadline, "the rendezvous")
            )
            store = dist.PrefixStore(rendezvous.prefix, client)
            _meet(store, rank, rendezvous.size, deadline)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = _remaining(deadline, "connecting") / _CONNECT_ATTEMPTS
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_local_address(rendezvous))]
            self._group: Any = dist.ProcessGroupGloo(store, rank, rendezvous.size, options)
        except (RuntimeError, OSError) as error:  # torch raises DistError, a RuntimeError
            raise TransportError(f"rendezvous at {rendezvous.host}:{rendezvous.port} failed: {error}") from error

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = _remaining(deadline, "a broadcast")
        return _GlooPending(self._started(lambda: self._group.broadcast([tensor], options)))

    def send(self, tensor: torch.Tensor, to: int, deadline: float) -> None:
        _GlooPending(self._started(lambda: self._group.send([tensor], to, 0))).wait(deadline)

    def receive(self, tensor: torch.Tensor, source: int, deadline: float) -> None:
        _GlooPending(self._started(lambda: self._group.recv([tensor], source, 0))).wait(deadline)

    def _started(self, operation: Any) -> Any:
        if self._group is None:
            raise TransportError("the channel was aborted")
        try:
            return operation()
        except RuntimeError as error:
            raise TransportError(str(error)) from error

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class _GlooPending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, deadline: float) -> None:
        try:
            self._work.wait(_remaining(deadline, "a transfer"))
        except RuntimeError as error:
            raise TransportError(str(error).splitlines()[0]) from error


def _meet(store: dist.Store, rank: int, size: int, deadline: float) -> None:
    """Returns when every member is here; connecting to one that never comes would outlast the deadline."""
    here = {member: f"here/{member}" for member in range(size)}
    store.set(here[rank], "")
    try:
        store.wait(list(here.values()), _remaining(deadline, "the rendezvous"))
    except RuntimeError as error:
        absent = [member for member, key in here.items() if not store.check([key])]
        raise TransportError(f"rank {', '.join(map(str, absent))} of {size} did not come in time") from error


def _remaining(deadline: float, what: str) -> timedelta:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TransportError(f"no time left for {what}")
    return timedelta(seconds=max(seconds, 0.001))


def _local_address(rendezvous: Rendezvous) -> str:
    """Address of the interface that reaches the rendezvous (gloo would take the one the host name resolves to)."""
    with socket.socket(socket.AF_INET6 if ":" in rendezvous.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, rendezvous.port))
        return str(probe.getsockname()[0])
