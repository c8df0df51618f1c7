"""The stream of a version over real gloo channels (all members in one process, one thread each)."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agentrl.weights.manifest import Manifest, TensorInfo
from megatron_agentrl.weights.staging import BeginStaging, StagingArea
from megatron_agentrl.weights.stream import ManifestError, Receiver, Sender, StreamAborted
from megatron_agentrl.weights.transport import GlooChannel, GlooTransport


def soon(seconds=10.0):
    return time.monotonic() + seconds


class Replica:
    """A channel with `workers` receiving ends, each in a thread; their results by rank."""

    def __init__(self, transport, manifest, workers=1, name="e", receive=Receiver.receive, seconds=10.0):
        self.received, self.errors = {}, {}
        rendezvous = transport.invite(name, 1 + workers)

        def work(rank):
            channel = GlooChannel(rendezvous, rank, soon())
            receiver = Receiver(manifest)
            try:
                receive(receiver, channel, soon(seconds))
                self.received[rank] = receiver.tensors
            except Exception as error:
                self.errors[rank] = error
            self.ends[rank] = channel

        self.ends = {}
        self.threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(1, 1 + workers)]
        for thread in self.threads:
            thread.start()
        self.channel = transport.open(rendezvous, 0, soon())

    def join(self):
        for thread in self.threads:
            thread.join(15)
        self.channel.abort()


@pytest.fixture(scope="module")
def transport():
    return GlooTransport()


def manifest_of(tensors):
    return Manifest(tuple(TensorInfo.of(name, tensor) for name, tensor in tensors.items()))


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=12),
    frame_bytes=st.sampled_from([1, 64, 300, 1 << 20]),
)
def test_any_version_arrives_bit_for_bit_whatever_the_frame_size(transport, kinds, frame_bytes):
    tensors = {f"t{i}": (torch.randn(shape) * 50).to(dtype) for i, (shape, dtype) in enumerate(kinds)}
    manifest = manifest_of(tensors)
    replica = Replica(transport, manifest)
    sender = Sender(manifest, {"e": replica.channel}, soon(), frame_bytes)
    sender.send(iter(tensors.items()))
    assert sender.acknowledged() == {"e": [(True, len(kinds))]}
    replica.join()
    assert list(replica.received[1]) == list(tensors)
    assert all(same(replica.received[1][name], tensor) for name, tensor in tensors.items())


def test_every_worker_of_every_replica_gets_the_same_version(transport):
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(7).t()}
    manifest = manifest_of(tensors)
    replicas = {name: Replica(transport, manifest, workers, name) for name, workers in (("x", 2), ("y", 1))}
    sender = Sender(manifest, {name: r.channel for name, r in replicas.items()}, soon(), frame_bytes=32)
    sender.send(iter(tensors.items()))
    assert sender.acknowledged() == {"x": [(True, 2), (True, 2)], "y": [(True, 2)]}
    for replica in replicas.values():
        replica.join()
        assert all(same(got["a"], tensors["a"]) for got in replica.received.values())


def test_a_tensor_that_reuses_its_memory_for_the_next_one_arrives_as_it_was(transport):
    """A gathering iterator may hand out one buffer again and again."""
    manifest = Manifest(tuple(TensorInfo(f"t{i}", (4,), "float32") for i in range(3)))

    def one_buffer():
        buffer = torch.empty(4)
        for i in range(3):
            buffer.fill_(float(i))
            yield f"t{i}", buffer

    replica = Replica(transport, manifest)
    sender = Sender(manifest, {"e": replica.channel}, soon())
    sender.send(one_buffer())
    assert sender.acknowledged() == {"e": [(True, 3)]}
    replica.join()
    assert [t.tolist() for t in replica.received[1].values()] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


def test_a_non_contiguous_tensor_arrives_in_its_own_order(transport):
    tensors = {"a": torch.arange(6.0).view(2, 3).t()}
    replica = Replica(transport, manifest_of(tensors))
    sender = Sender(manifest_of(tensors), {"e": replica.channel}, soon())
    sender.send(iter(tensors.items()))
    assert sender.acknowledged() == {"e": [(True, 1)]}
    replica.join()
    assert replica.received[1]["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_bytes_that_changed_on_the_way_are_refused_by_the_receiver(transport):
    tensors = {"a": torch.zeros(8), "b": torch.ones(8)}

    def damaging(receiver, channel, deadline):
        class Damaging:
            rank, size = channel.rank, channel.size
            send, receive, abort = channel.send, channel.receive, channel.abort

            def broadcast(self, tensor, deadline):
                pending = channel.broadcast(tensor, deadline)

                class Done:
                    def wait(self, deadline):
                        pending.wait(deadline)
                        if tensor.dtype == torch.uint8 and tensor.numel() == 64:
                            tensor[40] ^= 1  # in b

                return Done()

        receiver.receive(Damaging(), deadline)

    replica = Replica(transport, manifest_of(tensors), receive=damaging)
    sender = Sender(manifest_of(tensors), {"e": replica.channel}, soon())
    sender.send(iter(tensors.items()))
    assert sender.acknowledged() == {"e": [(False, 2)]}
    replica.join()
    assert isinstance(replica.errors[1], ManifestError)
    assert str(replica.errors[1]) == "1 tensors arrived damaged, the first is b"


def test_a_sender_that_gives_up_tells_the_receiver(transport):
    tensors = {"a": torch.zeros(8), "b": torch.ones(8)}
    replica = Replica(transport, manifest_of(tensors))
    sender = Sender(manifest_of(tensors), {"e": replica.channel}, soon(), frame_bytes=32)
    with pytest.raises(ManifestError, match="b"):
        sender.send(iter([("b", tensors["b"])]))
    replica.join()
    assert isinstance(replica.errors[1], StreamAborted)


def test_a_receiver_that_stalls_is_dropped_alone_before_the_deadline(transport):
    tensors = {"a": torch.zeros(1 << 22), "b": torch.zeros(1 << 22)}  # more than socket buffers hold
    manifest = manifest_of(tensors)
    release = threading.Event()

    def stalling(receiver, channel, deadline):
        release.wait(10)

    good, bad = Replica(transport, manifest, name="good"), Replica(transport, manifest, name="bad", receive=stalling)
    sender = Sender(manifest, {"bad": bad.channel, "good": good.channel}, soon(4.0))
    sender.send(iter(tensors.items()))
    answers = sender.acknowledged()
    assert answers == {"good": [(True, 2)]}, (sender.failures, good.errors)
    assert list(sender.failures) == ["bad"] and time.monotonic() < sender.deadline
    release.set()
    good.join()
    bad.join()


def test_a_name_twice_or_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="more than once: a"):
        Manifest((TensorInfo("a", (1,), "float32"), TensorInfo("a", (1,), "float32")))
    with pytest.raises(ValueError, match="'float33' is not a torch dtype"):
        _ = TensorInfo("a", (1,), "float33").nbytes


def test_a_staging_area_says_what_stands_in_the_way():
    area = StagingArea(1)
    with pytest.raises(RuntimeError, match="no manifest was ever sent"):
        area.begin(BeginStaging(0, 1.0))
    with pytest.raises(RuntimeError, match="no channel to the trainer"):
        area.begin(BeginStaging(0, 1.0, Manifest((TensorInfo("a", (1,), "float32"),))))
    with pytest.raises(RuntimeError, match="nothing to install: staging is idle"):
        area.take(0)
