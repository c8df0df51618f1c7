"""The engine layouts against vLLM itself: its own loaders fill its own model of each rank with numbered tensors.

A vLLM upgrade that renames a parameter, moves a shard or keeps another type fails here, with the parameter's name.
What vLLM's CPU build cannot construct is in docs/layouts.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from layout_configs import deepseek, llama, nemotron, qwen3, qwen3_moe

from megatron_agentrl.layout.engine import EngineTopology

ROOT = Path(__file__).parents[2]
#: Two KV heads, and sizes that eight ranks divide.
WIDE = nemotron(n_groups=8, intermediate_size=48, moe_intermediate_size=24, moe_shared_expert_intermediate_size=32)
LATENT = nemotron(moe_latent_size=16, hybrid_override_pattern="ME-*E-", num_attention_heads=4)
MOE = qwen3_moe(num_attention_heads=8, num_key_value_heads=2, moe_intermediate_size=8, intermediate_size=24)
MIXED = qwen3_moe(num_key_value_heads=2, mlp_only_layers=[1], tie_word_embeddings=True)

#: name -> (config, topology, ranks to trace; None is all of them)
FAST = {
    "nemotron, one rank": (nemotron(), {}, None),
    "nemotron, tp": (nemotron(), {"tp": 2}, None),
    "nemotron, 2 KV heads on 8 ranks": (WIDE, {"tp": 8}, [5]),
    "nemotron with latent experts, tp and pp": (LATENT, {"tp": 2, "pp": 2}, [3]),
    "qwen3_moe, experts by tp over dp": (MOE, {"tp": 2, "dp": 2}, [2]),
    "qwen3_moe, 12 experts on 5 ranks": (MOE, {"dp": 5, "expert_parallel": True}, [1, 2]),
    "qwen3_moe, tied, a dense layer, pp": (MIXED, {"tp": 2, "pp": 2}, [0, 3]),
    "qwen3, 2 KV heads on 4 ranks": (qwen3(), {"tp": 4}, [1, 2]),
    "llama, 5 layers on 3 stages": (llama(), {"pp": 3}, None),
    "deepseek, tp": (deepseek(), {"tp": 2}, [1]),
    "deepseek, experts whole, shared experts whole": (deepseek(), {"tp": 2, "dp": 2, "expert_parallel": True}, [3]),
    "deepseek without a query latent": (deepseek(q_lora_rank=None), {"tp": 2}, [1]),
}
SLOW = {
    "nemotron, 2 KV heads, every one of 8 ranks": (WIDE, {"tp": 8}, None),
    "nemotron, tp 4": (nemotron(), {"tp": 4}, None),
    "nemotron, tp and pp": (nemotron(), {"tp": 2, "pp": 2}, None),
    "nemotron, 3 stages": (nemotron(), {"pp": 3}, None),
    "nemotron, stages by hand": (nemotron(), {"pp": 3, "layers": [3, 4, 1]}, None),
    "nemotron, tp, dp, experts whole": (nemotron(), {"tp": 2, "dp": 2, "expert_parallel": True}, None),
    "nemotron, tp, dp": (nemotron(), {"tp": 2, "dp": 2}, None),
    "nemotron with latent experts": (LATENT, {"tp": 4, "expert_parallel": True}, None),
    "qwen3_moe": (MOE, {}, None),
    "qwen3_moe, tp 8": (MOE, {"tp": 8}, None),
    "qwen3_moe, tp, pp, dp, experts whole": (MOE, {"tp": 2, "pp": 2, "dp": 2, "expert_parallel": True}, None),
    "qwen3_moe, tp, experts whole": (MOE, {"tp": 4, "expert_parallel": True}, None),
    "qwen3_moe, tied, 3 stages": (MIXED, {"pp": 3}, None),
    "qwen3, tp 8": (qwen3(), {"tp": 8}, None),
    "qwen3, tied, 4 stages": (qwen3(tie_word_embeddings=True), {"tp": 2, "pp": 4}, None),
    "llama, tied": (llama(tie_word_embeddings=True), {"tp": 4}, None),
    "llama, tp and pp": (llama(), {"tp": 2, "pp": 2}, None),
    "deepseek": (deepseek(), {}, None),
    "deepseek, tp and pp": (deepseek(), {"tp": 2, "pp": 2}, None),
    "deepseek, tp 8": (deepseek(), {"tp": 8}, None),
    "deepseek, tp, dp": (deepseek(), {"tp": 2, "dp": 2}, None),
    "deepseek, tp, pp, dp, experts whole": (deepseek(), {"tp": 2, "pp": 2, "dp": 2, "expert_parallel": True}, None),
}
TYPED = {"nemotron_h": nemotron(), "qwen3_moe": MOE, "qwen3": qwen3(), "llama": llama(), "deepseek_v3": deepseek()}


def case(what, config, topology, ranks):
    world = EngineTopology(**topology | {"layers": None}).world
    return {"what": what, "config": config, "topology": topology, "ranks": range(world) if ranks is None else ranks}


def trace(cases) -> list[list[str]]:
    """What differs in each case, from one process that imports vLLM once."""
    lines = "".join(json.dumps(item | {"ranks": list(item["ranks"])}) + "\n" for item in cases)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'layout'}"}
    command = [sys.executable, str(ROOT / "tests" / "layout" / "vllm_tracer.py")]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, timeout=280)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0 and len(found) == len(cases), done.stderr[-2000:]
    return found


@pytest.fixture(scope="module")
def traced():
    names = [*FAST, *TYPED, "moved"]
    cases = [case("values", *found) for found in FAST.values()]
    cases += [case("types", config, {}, None) for config in TYPED.values()]
    cases.append(case("moved", qwen3(), {"tp": 2}, [0]))
    return dict(zip(names, trace(cases), strict=True))


@pytest.fixture(scope="module")
def traced_slowly():
    return dict(zip(SLOW, trace([case("values", *found) for found in SLOW.values()]), strict=True))


@pytest.mark.parametrize("name", FAST)
def test_every_element_that_vllm_loads_is_where_the_layout_says(traced, name):
    assert traced[name] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_element_of_every_rank_is_where_the_layout_says(traced_slowly, name):
    assert traced_slowly[name] == []


@pytest.mark.parametrize("name", TYPED)
def test_a_bf16_engine_keeps_in_fp32_what_the_layout_says(traced, name):
    """And no more, but for Nemotron-H's router: vLLM widens it where no special kernel reads bf16 (not on Hopper)."""
    routers = [f"model.layers.{layer}.mixer.gate.weight: torch.float32, not compute" for layer in (2, 5, 7)]
    assert traced[name] == (routers if name == "nemotron_h" else [])


def test_a_shard_that_vllm_moves_is_named_with_its_first_wrong_element(traced):
    parts = [problem.split(" elements differ, first at ")[0] for problem in sorted(traced["moved"])]
    assert parts == [
        f"model.layers.{layer}.{name}.weight: {count}"
        for layer in range(4)
        for name, count in (("mlp.down_proj", 18 * 20), ("self_attn.o_proj", 18 * 24))
    ]
    assert all("vLLM has" in problem for problem in traced["moved"])
