"""The publish protocol against scripted engines: what a failure at each point leaves behind, and what it says."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from scripted_engine import TOKEN, ScriptedEngine, mean, score

from megatron_agentrl.launch.endpoints import free_ports
from megatron_agentrl.rollout.weights_client import VllmEngine
from megatron_agentrl.weights.engine import EngineError, Staging
from megatron_agentrl.weights.manifest import Manifest, TensorInfo
from megatron_agentrl.weights.publish import Canary, Publisher, largest_gap
from megatron_agentrl.weights.stream import ManifestError
from megatron_agentrl.weights.transport import GlooTransport, TransportError

SEQUENCES = [[5, 6, 7, 8], [9, 1, 2, 3, 4]]


def weights(version):
    generator = torch.Generator().manual_seed(version)
    shapes = {
        "embed.weight": (11, 3),
        "layers.0.mixer.weight": (7, 5),
        "layers.0.bias": (5,),
        "lm_head.weight": (11, 3),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


MANIFEST = Manifest(tuple(TensorInfo.of(name, tensor) for name, tensor in weights(0).items()))


def canary_of(tensors):
    return Canary(SEQUENCES, [score(sequence, mean(tensors)) for sequence in SEQUENCES])


class Setup:
    """Engines, their publisher, and the states it announced."""

    def __init__(self, stack, names=("engine-0",), deadline=10.0):
        self.scripted = {name: stack.enter_context(ScriptedEngine(name)) for name in names}
        self.states = []
        self.transport = GlooTransport()
        self.publisher = Publisher(
            [VllmEngine(name, engine.url, TOKEN) for name, engine in self.scripted.items()],
            self.transport,
            tolerance=1e-6,
            deadline=deadline,
            on_state=lambda engine, state, version: self.states.append((engine, state, version)),
        )
        stack.callback(self.publisher.close)

    @property
    def engine(self):
        return self.scripted["engine-0"]

    def publish(self, version, tensors=None, canary=None):
        tensors = tensors or weights(version)
        report = self.publisher.publish(version, MANIFEST, iter(tensors.items()), canary or canary_of(tensors))
        self.outcome = report.engines["engine-0"]
        return report


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def one(stack):
    return Setup(stack)


def test_versions_reach_the_engine_and_are_proven_by_what_it_computes(one):
    for version in range(3):
        report = one.publish(version)
        assert report.proven == ["engine-0"]
        assert report.gap < 1e-9
        assert report.nbytes == 4 * (33 + 35 + 5 + 33)
        assert one.engine.version == str(version)
        assert one.engine.weight == pytest.approx(mean(weights(version)), abs=1e-12)
    assert one.states == [(("engine-0"), state, v) for v in range(3) for state in ("held", "serving")]
    assert set(report.seconds) == {"stage", "pause", "install", "resume", "canary", "reference", "total"}


def test_order_of_calls_pauses_before_the_version_is_taken_away_and_resumes_after_it_is_named(one):
    one.publish(0)
    assert one.engine.calls == [
        "/collective_rpc",
        "/pause",
        "/update_weight_version",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]


def test_a_missing_tensor_is_caught_before_any_engine_is_touched(one):
    one.publish(0)
    partial = dict(list(weights(1).items())[:-1])
    with pytest.raises(ManifestError, match="1 tensors of the manifest never came, the first is lm_head.weight"):
        one.publish(1, partial)
    assert one.engine.version == "0" and not one.engine.paused
    assert one.publish(2).proven == ["engine-0"]  # over the same channel


def test_a_tensor_of_another_shape_names_both(one):
    wrong = weights(0) | {"layers.0.bias": torch.zeros(6)}
    with pytest.raises(ManifestError, match=r"shape=\(6,\).*where the manifest has.*shape=\(5,\)"):
        one.publish(0, wrong)


def test_an_error_of_the_trainer_while_it_gathers_leaves_the_old_version(one):
    one.publish(0)

    def gathering():
        yield next(iter(weights(1).items()))
        raise ArithmeticError("expert 3 is not finite")

    with pytest.raises(ArithmeticError, match="expert 3"):
        one.publisher.publish(1, MANIFEST, gathering(), canary_of(weights(1)))
    assert one.engine.version == "0"
    assert one.publish(1).proven == ["engine-0"]


def test_weights_that_were_sent_but_not_used_are_quarantined_with_the_numbers_and_recover(one):
    one.publish(0)
    one.engine.faults.stale_install = True
    report = one.publish(1)
    outcome = report.engines["engine-0"]
    gap = abs(mean(weights(1)) - mean(weights(0)))
    assert outcome.state == "quarantined" and outcome.phase == "canary"
    assert outcome.gap == pytest.approx(gap, rel=1e-6)
    assert f"version 1 differs from the trainer by {gap:.3g} nats at sequence 0, position" in outcome.error
    assert one.engine.version == "none" and one.engine.aborts == 1
    assert one.states[-1] == ("engine-0", "quarantined", None)
    one.engine.faults.stale_install = False
    assert one.publish(2).proven == ["engine-0"]
    assert one.states[-1] == ("engine-0", "serving", 2)


def test_a_logprob_that_is_not_a_number_is_a_gap():
    infinite = float("inf")
    for odd in (float("nan"), -infinite):
        assert largest_gap([[-1.0, -2.0]], [[-1.0, odd]]) == (infinite, "sequence 0, position 2")
        assert largest_gap([[-1.0, odd]], [[-1.0, odd]]) == (infinite, "sequence 0, position 2")


@pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_failure_during_install_leaves_version_none_and_no_requests(one, route):
    one.publish(0)
    one.engine.faults.status = {route: 500}
    report = one.publish(1)
    assert report.proven == []
    assert one.outcome.state == "none" and one.outcome.phase == "install"
    assert f"scripted failure of {route}" in one.outcome.error
    assert one.engine.version == "none" and one.engine.paused and one.engine.aborts == 1
    assert one.states[-1] == ("engine-0", "none", None)
    one.engine.faults.status = {}
    assert one.publish(2).proven == ["engine-0"]
    assert not one.engine.paused


def test_a_failed_pause_keeps_the_old_version_in_service(one):
    one.publish(0)
    one.engine.faults.status = {"/pause": 500}
    report = one.publish(1)
    assert report.engines["engine-0"].state == "unchanged" and one.engine.version == "0" and not one.engine.paused
    assert ("engine-0", "held", 1) not in one.states


def test_a_late_engine_is_named_with_its_phase_and_the_other_is_proven(stack):
    two = Setup(stack, names=("engine-0", "engine-1"), deadline=1.5)
    two.scripted["engine-1"].faults.delay = {"/pause": 6.0}
    begin = time.monotonic()
    report = two.publish(0)
    assert time.monotonic() - begin < 7.5  # deadline, then at most 5 s to leave the engine in a defined state
    assert report.proven == ["engine-0"]
    late = report.engines["engine-1"]
    assert late.phase == "pause" and "engine-1: /pause took more than" in late.error
    assert "the publish deadline passed" in late.error


def test_an_engine_that_never_receives_is_late_in_staging(one):
    one.publish(0)
    one.publisher._seconds = 1.0
    one.engine.faults.delay = {"/collective_rpc": 3.0}
    report = one.publish(1)
    assert one.outcome.phase == "stage" and one.outcome.state == "unchanged"
    assert "/collective_rpc took more than" in one.outcome.error
    assert one.engine.version == "0" and report.proven == []


def test_a_server_that_is_something_else_is_named_with_what_it_answers(one):
    """As when another program got the port."""
    engine = one.publisher.engines["engine-0"]
    one.engine.faults.status = {"/collective_rpc": 200, "/weight_info": 200, "/health": 404}
    for call in (engine.staging, engine.version):
        with pytest.raises(EngineError, match="engine-0: /.* in the reply: scripted failure") as caught:
            call(time.monotonic() + 5)
        assert caught.value.kind == "protocol"
    with pytest.raises(EngineError, match="did not come up in time .*/health answers 404"):
        engine.wait_ready(time.monotonic() + 0.1)


def test_an_engine_that_agrees_to_receive_and_never_joins_leaves_the_other_its_time(stack):
    two = Setup(stack, names=("engine-0", "engine-1"), deadline=4.0)

    class Deaf:
        begin = staticmethod(lambda request: None)
        status = staticmethod(lambda: Staging("receiving", 0))
        close = staticmethod(lambda: None)

    two.scripted["engine-0"].staging = Deaf()
    begin = time.monotonic()
    report = two.publish(0)
    assert time.monotonic() - begin < 4.0
    assert report.proven == ["engine-1"], report.problems()
    assert two.outcome.phase == "stage" and "rank 1 of 2 did not come in time" in two.outcome.error


def test_an_engine_that_dies_between_meeting_and_connecting_does_not_outlast_the_deadline():
    transport = GlooTransport()
    rendezvous = transport.invite("engine-0", 2)
    client = torch.distributed.TCPStore(rendezvous.host, rendezvous.port, is_master=False)
    torch.distributed.PrefixStore(rendezvous.prefix, client).set("here/1", "")
    begin = time.monotonic()
    with pytest.raises(TransportError, match="rendezvous at"):
        transport.open(rendezvous, 0, begin + 3.0)
    assert time.monotonic() - begin < 3.5


def test_an_engine_that_restarted_gets_a_new_channel(one):
    one.publish(0)
    one.engine.staging.close()  # as a restart would: its end of the channel is gone
    report = one.publish(1)
    assert report.proven == [] and one.outcome.phase == "stage"
    assert one.publish(2).proven == ["engine-0"]


@pytest.fixture
def killable(stack):
    (port,) = free_ports("127.0.0.1", 1)
    script = Path(__file__).parent / "scripted_engine.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(port)], env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    engine = VllmEngine("engine-9", f"http://127.0.0.1:{port}", TOKEN)
    engine.wait_ready(time.monotonic() + 30, lambda: process.poll() is None)
    return process, engine


def test_an_engine_killed_while_it_stages_is_a_named_error_well_within_the_deadline(killable):
    process, engine = killable
    publisher = Publisher([engine], GlooTransport(), tolerance=1e-6, deadline=30.0)

    def tensors():
        for i, item in enumerate(weights(0).items()):
            if i == 2:
                process.send_signal(signal.SIGKILL)
                process.wait()
            yield item

    begin = time.monotonic()
    report = publisher.publish(0, MANIFEST, tensors(), canary_of(weights(0)))
    assert time.monotonic() - begin < 10
    outcome = report.engines["engine-9"]
    assert outcome.state == "unchanged" and outcome.phase == "stage"
    assert outcome.error.startswith("engine-9: ") and "Connection closed by peer" in outcome.error
    publisher.close()
