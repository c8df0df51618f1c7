"""Rules of `model.mtp`, each with what was found, what was expected and a way out."""

import pytest

from megatron_agentrl.recipe.mtp_rules import mtp_problems
from megatron_agentrl.recipe.schema import Mtp, Recipe, Recompute, Topology

WITH = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}


def problems(mtp: Mtp, config: dict | None, **sizes: int) -> list[str]:
    recipe = Recipe()
    recipe.model.mtp, recipe.topology = mtp, Topology(**sizes)
    return list(mtp_problems(recipe, config))


@pytest.mark.parametrize("config", [WITH, WITH | {"model_type": "nemotron_h"}])
def test_heads_may_be_trained_where_the_model_has_them_and_left_alone_anywhere(config):
    assert problems(Mtp(train=True, loss_weight=0.3, detach=False), config, world=2, pp=2) == []
    assert problems(Mtp(), config) == problems(Mtp(), {"model_type": "qwen3_moe"}) == problems(Mtp(), None) == []


@pytest.mark.parametrize(
    ("mtp", "config", "sizes", "line"),
    [
        (Mtp(train=True), {"model_type": "nemotron_h"}, {}, "model.mtp.train=true: the model has no prediction heads "
         "(config.json: num_nextn_predict_layers is None); set model.mtp.train=false"),
        (Mtp(train=True), WITH | {"num_nextn_predict_layers": 0}, {}, "num_nextn_predict_layers is 0"),
        (Mtp(train=True), WITH | {"model_type": "qwen3_moe"}, {}, "heads of a 'qwen3_moe' model are not trained here"),
        (Mtp(train=True), WITH | {"tie_word_embeddings": True}, {"world": 2, "pp": 2}, "set topology.pp=1"),
        (Mtp(train=True), WITH, {"world": 2, "pp": 2, "overlap_grad_reduce": True}, "set topology.overlap_grad_reduce=false"),
        (Mtp(loss_weight=0.3), WITH, {}, "model.mtp.loss_weight=0.3: has no effect with model.mtp.train=false"),
        (Mtp(detach=False), WITH, {}, "model.mtp.detach=false: has no effect with model.mtp.train=false"),
    ],
)  # fmt: skip
def test_one_line_for_each_setting_that_cannot_be(mtp, config, sizes, line):
    (found,) = problems(mtp, config, **sizes)
    assert line in found


def test_packed_rows_go_with_heads_and_longer_recomputed_units_do_not():
    recipe = Recipe()
    recipe.model.mtp.train, recipe.train.packing, recipe.topology = True, True, Topology(world=2, cp=2)
    recipe.memory.recompute = Recompute.full
    assert list(mtp_problems(recipe, WITH)) == []
    recipe.memory.recompute_layers = 2
    (line,) = mtp_problems(recipe, WITH)
    assert "memory.recompute_layers=2; set uniform and 1" in line
