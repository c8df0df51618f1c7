"""Latent attention and prediction heads on two processes against one. One start serves every layout."""

from __future__ import annotations

import json
from pathlib import Path

import mtp_toy
import processes
import pytest
import torch
import trainer_toy as toy
from test_trainer_parallel import same_tensors

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import checkpoint
from megatron_agentrl.trainer.config import transformer_config
from megatron_agentrl.trainer.step import train_step

LAYOUTS = ("ep2", "tp2-sp", "tp2-sp-ep2", "pp2", "cp2-ep2-packed")


def start(shared: Path, layouts: tuple[str, ...]) -> list[dict]:
    processes.run("mtp_worker.py", 2, shared, str(shared), *layouts, meetings=len(layouts))
    return [json.loads((shared / f"mtp-results-{index}.json").read_text()) for index in range(2)]


def alone(shared: Path, name: str, rank, **mtp: object) -> dict:
    """One process, one micro-batch. Leaves the weights that the others start from."""
    chunks, opt = mtp_toy.build(name, rank, toy.SGD, **mtp)
    checkpoint.save_weights(shared / f"start-{name}", chunks)
    results = []
    for step in range(1, 5):
        result = train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=0.1, tokens=toy.TOKENS)
        results.append([result.loss, result.grad_norm, result.metrics["mtp_cross_entropy"]])
        if step == 1:
            gradient = {key: p.main_grad.clone() for key, p in chunks[0].module.named_parameters()}
    end = {key: p.detach().clone() for key, p in chunks[0].module.named_parameters()}
    return {"results": results, "gradient": gradient, "end": end}


def weights(folder: Path, name: str, rank) -> dict[str, torch.Tensor]:
    chunks, _ = mtp_toy.build(name, rank, toy.SGD)
    checkpoint.load_weights(folder, chunks)
    return {key: parameter.detach().clone() for key, parameter in chunks[0].module.named_parameters()}


@pytest.fixture(scope="module")
def pair(rank, tmp_path_factory):
    shared = tmp_path_factory.mktemp("mtp")
    attached = alone(shared, "deepseek", rank, detach=False)
    want = {name: alone(shared, name, rank) for name in mtp_toy.MODELS} | {"attached deepseek": attached}
    return shared, want, start(shared, LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", mtp_toy.MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_gradients_and_weights_equal_one_process(pair, rank, layout, name):
    shared, want, found = pair
    for result in found:
        got = torch.tensor(result[f"{layout} {name}"])
        torch.testing.assert_close(got, torch.tensor(want[name]["results"]), rtol=1e-5, atol=0)
    for what in ("gradient", "end"):
        same_tensors(want[name][what], weights(shared / f"{what}-{layout}-{name}", name, rank))


@pytest.mark.slow
def test_an_embedding_on_both_stages_gets_the_gradient_of_both(pair, rank):
    shared, want, found = pair
    for result in found:
        got = torch.tensor(result["pp2 attached deepseek"])
        torch.testing.assert_close(got, torch.tensor(want["attached deepseek"]["results"]), rtol=1e-5, atol=0)
    same_tensors(want["attached deepseek"]["end"], weights(shared / "end-attached-deepseek", "deepseek", rank))


def test_a_cell_that_cannot_run_is_refused_with_the_reason():
    words = "topology.tp=2: with latent attention needs topology.sequence_parallel=true"
    with pytest.raises(ValueError, match=words):
        transformer_config(mtp_toy.DEEPSEEK, mtp_toy.recipe(Topology(world=2, tp=2)))
