"""Latent attention: what it does not go with, and what an engine needs of a deepseek_v3 folder."""

import pytest

from megatron_agentrl.recipe.mla_rules import latent_packing_problems, latent_problems, latent_topology_problems
from megatron_agentrl.recipe.schema import Recipe, Topology

RELEASED = {
    "model_type": "deepseek_v3",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def test_the_released_config_is_served_by_gpus_and_other_models_are_not_asked():
    assert list(latent_problems(RELEASED, on_cpu=False)) == []
    assert list(latent_problems({"model_type": "nemotron_h"}, on_cpu=True)) == []
    assert list(latent_problems(None, on_cpu=True)) == []


@pytest.mark.parametrize(
    ("changes", "on_cpu", "words"),
    [
        ({"topk_method": None}, False, "config.json: topk_method is None, expected 'noaux_tc'"),
        ({"scoring_func": "softmax"}, False, "scoring_func is 'softmax', expected 'sigmoid'"),
        (
            {},
            True,
            "whose latent attention an engine on a CPU does not compute as the trainer does; use engines on GPUs",
        ),
    ],
)
def test_one_line_for_each_thing_the_engine_cannot_serve(changes, on_cpu, words):
    (line,) = latent_problems(RELEASED | changes, on_cpu=on_cpu)
    assert words in line


SIZES = {"kv_lora_rank": 14, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": None}


@pytest.mark.parametrize(
    ("sizes", "config", "words"),
    [
        ({"world": 2, "tp": 2}, SIZES, "else the rotary key's gradient is not summed over the ranks; set it"),
        ({"world": 4, "tp": 4, "sequence_parallel": True}, SIZES, "the latents have 22 rows (kv_lora_rank + qk_rope_head_dim)"),
        ({"world": 2, "tp": 2, "sequence_parallel": True}, SIZES | {"q_lora_rank": 5}, "the latents have 5 rows (q_lora_rank)"),
    ],
)  # fmt: skip
def test_cuts_that_latent_attention_does_not_take(sizes, config, words):
    (line,) = latent_topology_problems(Topology(**sizes), config)
    assert words in line
    assert list(latent_topology_problems(Topology(**sizes), {"model_type": "llama"})) == []
    assert list(latent_topology_problems(Topology(world=2, cp=2), config)) == []


def test_packed_rows_are_refused_only_where_values_are_wider_than_keys():
    recipe = Recipe()
    recipe.train.packing = True
    assert list(latent_packing_problems(recipe, SIZES)) == list(latent_packing_problems(recipe, None)) == []
    (line,) = latent_packing_problems(recipe, SIZES | {"v_head_dim": 21})
    assert "v_head_dim=21, keys 20" in line and "set train.packing=false" in line
