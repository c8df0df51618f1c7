"""A real vLLM server under the publish protocol. Reference: transformers in float32."""

import asyncio
import os
import signal
import time
from contextlib import contextmanager

import psutil
import pytest
import torch
from tiny_models import VOCABULARY, Versions, nemotron_h_moe, qwen3_moe_tied

from megatron_agentrl.launch.endpoints import free_ports
from megatron_agentrl.rollout.client import EngineError, VllmClient
from megatron_agentrl.rollout.engine import EngineSpec, start
from megatron_agentrl.rollout.weights_client import VllmEngine
from megatron_agentrl.weights.manifest import Manifest, TensorInfo
from megatron_agentrl.weights.publish import Canary, Publisher
from megatron_agentrl.weights.transport import GlooTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "a-token"
PROMPT = [7, 77, 99, 201, 45, 8, 200, 13]


class Running:
    """A server of `versions` and a publisher that brings them to it; states as announced."""

    def __init__(self, name, spec, process, log, versions):
        self.spec, self.process, self.log, self.versions = spec, process, log, versions
        self.engine = VllmEngine(name, spec.url, TOKEN)
        self.engine.wait_ready(time.monotonic() + 200, lambda: process.poll() is None)
        self.states = []
        self.publisher = Publisher(
            [self.engine],
            GlooTransport(),
            tolerance=1e-4,
            deadline=60.0,
            on_state=lambda engine, state, version: self.states.append((state, version)),
        )
        self.manifest = Manifest(tuple(TensorInfo.of(n, t) for n, t in versions.tensors(0).items()))
        generator = torch.Generator().manual_seed(5)
        self.canary = [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in (48, 33)]

    def publish(self, version, weights, manifest=None, tensors=None):
        """Publishes the weights of `weights` (an index into versions) under the number `version`."""
        expected = [self.versions.logprobs(weights, sequence) for sequence in self.canary]
        tensors = iter((tensors or self.versions.tensors(weights)).items())
        return self.publisher.publish(version, manifest or self.manifest, tensors, Canary(self.canary, expected))

    def generate(self, count=1, prompt=PROMPT, **kwargs):
        async def main():
            client = VllmClient(self.engine.name, self.spec.url, TOKEN)
            try:
                asked = {"max_tokens": 24, "temperature": 1.0} | kwargs
                return await asyncio.gather(*[client.generate(prompt, **asked) for _ in range(count)])
            finally:
                await client.close()

        return asyncio.run(main())

    def gap(self, reply, weights, start=0, stop=None, prompt=PROMPT):
        """Largest |engine − reference| of the reply's tokens [start, stop)."""
        want = self.versions.logprobs(weights, prompt + reply.ids)[len(prompt) - 1 :]
        return max(abs(a - b) for a, b in list(zip(reply.logprobs, want, strict=True))[start:stop])


@contextmanager
def running(name, versions, folder, extra_path=""):
    (port,) = free_ports("127.0.0.1", 1)
    spec = EngineSpec(
        name, versions.folder(0), "127.0.0.1", port, max_length=768, max_num_seqs=16, kv_cache_bytes=1 << 28
    )
    os.environ["PYTHONPATH"], old = f"{extra_path}:{os.environ.get('PYTHONPATH', '')}", os.environ.get("PYTHONPATH", "")
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = start(spec, TOKEN, out)
    os.environ["PYTHONPATH"] = old
    try:
        yield Running(name, spec, process, log, versions)
    finally:
        print(log.read_text()[-3000:])  # shown when a test fails
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nemotron")
    with running("nemotron", Versions(folder, nemotron_h_moe, 3), folder) as server:
        yield server


STOCK_PREPACK = """
import os
import megatron_agentrl.cpu.vllm as repairs

def prepack_unless_flagged():
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as method
    stock = method.process_weights_after_loading
    def process(self, layer):
        if not os.path.exists({flag!r}):
            self.moe_kernel = None
        stock(self, layer)
    method.process_weights_after_loading = process

repairs._prepack_experts_on_every_load = prepack_unless_flagged
"""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, nemotron_is_done):
    folder = tmp_path_factory.mktemp("qwen")
    flag = folder / "stock-prepack"
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(STOCK_PREPACK.format(flag=str(flag)))
    with running("qwen", Versions(folder, qwen3_moe_tied, 3), folder, str(folder / "site")) as server:
        server.flag = flag
        yield server


@pytest.fixture(scope="module")
def nemotron_is_done(nemotron):
    """One server at a time: the other one is stopped before this one starts."""
    nemotron.process.kill()
    nemotron.process.wait()


# ---- Nemotron-H with experts -------------------------------------------------------------------------------------------


def test_before_the_first_publish_every_reply_is_an_error(nemotron):
    assert nemotron.engine.version(time.monotonic() + 10) is None
    with pytest.raises(EngineError, match="version 'default'") as caught:
        nemotron.generate()
    assert caught.value.kind == "unversioned"


def test_three_publishes_in_a_row_are_proven_and_the_first_replaces_all_placeholder_weights(nemotron):
    for version, weights in enumerate([0, 1, 2]):
        report = nemotron.publish(version, weights)
        assert report.proven == ["nemotron"], report.problems()
        assert report.gap <= 1e-4
        (reply,) = nemotron.generate(stop_token_ids=[3])
        assert set(reply.versions) == {version}
        assert nemotron.gap(reply, weights) <= 1e-4
        print(f"publish {version}: gap {report.gap:.1e}, {report.seconds}")
    assert nemotron.states == [(state, v) for v in range(3) for state in ("held", "serving")]


def test_requests_in_flight_carry_both_versions_and_each_token_matches_its_own(nemotron):
    assert nemotron.publish(10, 0).proven == ["nemotron"]

    async def main():
        client = VllmClient("nemotron", nemotron.spec.url, TOKEN)
        requests = [
            asyncio.create_task(client.generate(PROMPT, max_tokens=500, temperature=1.0, stop_token_ids=[]))
            for _ in range(6)
        ]
        await asyncio.sleep(0.5)
        report = await asyncio.to_thread(nemotron.publish, 11, 1)
        replies = await asyncio.gather(*requests)
        await client.close()
        return report, replies

    report, replies = asyncio.run(main())
    assert report.proven == ["nemotron"], report.problems()
    spanning = [reply for reply in replies if set(reply.versions) == {10, 11}]
    assert len(spanning) >= 3, [(len(r.ids), set(r.versions)) for r in replies]
    for reply in spanning:
        switch = reply.versions.index(11)
        assert reply.versions == [10] * switch + [11] * (500 - switch)
        assert nemotron.gap(reply, 0, stop=switch) <= 1e-4
        assert nemotron.gap(reply, 1, start=switch) <= 1e-4  # as if the new weights had read the whole context


def test_many_requests_at_once_match_the_reference(nemotron):
    assert nemotron.publish(20, 2).proven == ["nemotron"]
    for reply in nemotron.generate(count=16, max_tokens=32, temperature=1.0):
        assert nemotron.gap(reply, 2) <= 1e-4


def test_a_manifest_that_lacks_a_parameter_of_the_model_never_serves(nemotron):
    """The trainer left one tensor out of the plan: vLLM would only log it."""
    assert nemotron.publish(30, 0).proven == ["nemotron"]
    partial = nemotron.versions.tensors(1)
    left_out = next(name for name in partial if name.endswith("mixer.norm.weight"))
    del partial[left_out]
    manifest = Manifest(tuple(TensorInfo.of(n, t) for n, t in partial.items()))
    report = nemotron.publish(31, 1, manifest, partial)
    outcome = report.engines["nemotron"]
    assert outcome.state == "none" and outcome.phase == "install" and report.proven == []
    assert nemotron.engine.version(time.monotonic() + 10) is None
    report = nemotron.publish(32, 1)
    assert report.proven == ["nemotron"], report.problems()
    (reply,) = nemotron.generate()
    assert nemotron.gap(reply, 1) <= 1e-4


def test_a_wrong_token_is_refused_on_every_kind_of_route(nemotron):
    stranger = VllmEngine("nemotron", nemotron.spec.url, "another-token")
    for call in (stranger.version, stranger.resume, stranger.staging):
        with pytest.raises(EngineError, match="status 401"):
            call(time.monotonic() + 10)


def test_a_per_request_seed_with_a_chunked_prefill_does_not_kill_the_engine(nemotron):
    """Two prompts that together exceed a step, so that one is cut and its first sample thrown away."""
    import httpx

    body = {"token_ids": [5] * 700, "sampling_params": {"max_tokens": 2, "seed": 3, "logprobs": 0}}
    headers = {"Authorization": f"Bearer {TOKEN}"}

    async def main():
        async with httpx.AsyncClient(base_url=nemotron.spec.url, headers=headers, timeout=60) as http:
            return await asyncio.gather(*[http.post("/inference/v1/generate", json=body) for _ in range(14)])

    assert [response.status_code for response in asyncio.run(main())] == [200] * 14
    assert nemotron.publish(40, 0).proven == ["nemotron"]


def test_an_engine_killed_during_a_publish_is_a_named_error_and_leaves_no_process(nemotron):
    server = psutil.Process(nemotron.process.pid)
    children = server.children(recursive=True)
    assert children

    def killing():
        for i, item in enumerate(nemotron.versions.tensors(1).items()):
            if i == 3:
                server.send_signal(signal.SIGKILL)
            yield item

    begin = time.monotonic()
    report = nemotron.publisher.publish(50, nemotron.manifest, killing(), Canary([], []))
    assert time.monotonic() - begin < 30
    outcome = report.engines["nemotron"]
    assert report.proven == [] and outcome.error is not None and outcome.error.startswith("nemotron: ")
    print(outcome)
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


# ---- Qwen3 with experts and a tied head --------------------------------------------------------------------------------


def test_qwen_publishes_are_proven_with_its_prefix_cache_and_tied_head(qwen):
    for version, weights in enumerate([0, 1, 2]):
        report = qwen.publish(version, weights)
        assert report.proven == ["qwen"], report.problems()
        assert report.gap <= 1e-4
        for count in (1, 3):  # the same prompt of two blocks: read from the prefix cache, which the publish cleared
            for reply in qwen.generate(count, prompt=PROMPT * 9):
                assert qwen.gap(reply, weights, prompt=PROMPT * 9) <= 1e-4


def test_experts_that_are_not_packed_again_are_caught_by_the_canary_and_the_next_publish_recovers(qwen):
    """Stock vLLM's fault, restored by a sitecustomize of this test: a reload keeps the first experts' packing."""
    assert qwen.publish(10, 0).proven == ["qwen"]
    qwen.flag.touch()
    report = qwen.publish(11, 1)
    outcome = report.engines["qwen"]
    assert outcome.state == "quarantined" and outcome.gap > 0.01
    assert f"version 11 differs from the trainer by {outcome.gap:.3g} nats" in outcome.error
    assert qwen.states[-1] == ("quarantined", None)
    with pytest.raises(EngineError, match="version 'none'"):
        qwen.generate()
    qwen.flag.unlink()
    report = qwen.publish(12, 1)
    assert report.proven == ["qwen"], report.problems()
    (reply,) = qwen.generate()
    assert set(reply.versions) == {12} and qwen.gap(reply, 1) <= 1e-4
