"""What an engine needs of a deepseek_v3 folder."""

import pytest

from megatron_agentrl.recipe.mla_rules import latent_problems

RELEASED = {
    "model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid", "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}  # fmt: skip


def test_the_released_shape_is_served_anywhere_and_other_models_are_not_asked():
    for on_cpu in (True, False):
        assert list(latent_problems(RELEASED, on_cpu=on_cpu)) == []
        assert list(latent_problems({"model_type": "nemotron_h"}, on_cpu=on_cpu)) == []
    assert list(latent_problems(None, on_cpu=True)) == []


@pytest.mark.parametrize(
    ("changes", "on_cpu", "words"),
    [
        ({"topk_method": None}, False, "config.json: topk_method is None, expected 'noaux_tc'"),
        ({"scoring_func": "softmax"}, False, "scoring_func is 'softmax', expected 'sigmoid'"),
        ({"kv_lora_rank": 128}, True, "kv_lora_rank + qk_rope_head_dim = 192, but an engine on a CPU serves"),
    ],
)
def test_one_line_for_each_thing_the_engine_cannot_serve(changes, on_cpu, words):
    (line,) = latent_problems(RELEASED | changes, on_cpu=on_cpu)
    assert words in line


def test_narrow_latents_are_for_engines_on_gpus():
    assert list(latent_problems(RELEASED | {"kv_lora_rank": 128}, on_cpu=False)) == []
