"""What an engine needs of a deepseek_v3 folder."""

import pytest

from megatron_agentrl.recipe.mla_rules import latent_problems

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
