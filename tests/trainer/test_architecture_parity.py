"""Latent experts and dense decoders on two processes against one, and their checkpoint keys. One start for all cases."""

from __future__ import annotations

import json

import processes
import pytest
import torch
import trainer_toy as toy
from test_trainer_parallel import same_losses, same_tensors, weights

from megatron_agentrl.trainer import checkpoint, model
from megatron_agentrl.trainer.step import train_step

CASES = {"ep2": ["latent"], "tp2-sp-ep2": ["latent"], "tp2-sp": ["llama", "qwen3"], "pp2": ["latent", "llama"]}
PAIRS = [(layout, name) for layout, names in CASES.items() for name in names]


@pytest.fixture(scope="module")
def alone(rank, tmp_path_factory):
    """One process, one micro-batch, 4 SGD steps; and the weights that the two processes start from."""
    shared, found = tmp_path_factory.mktemp("parity"), {}
    for name in toy.FURTHER:
        chunks, opt = toy.build(name, rank, toy.SGD)
        checkpoint.save_weights(shared / f"start-{name}", chunks)
        results = []
        for step in range(1, 5):
            batches = [toy.rows(range(6))]
            results.append(train_step(chunks, opt, batches, toy.negative_logprob, lr=0.1, tokens=toy.TOKENS, step=step))
            if step == 1:
                gradient = {key: p.main_grad.clone() for key, p in chunks[0].module.named_parameters()}
        end = {key: p.detach().clone() for key, p in chunks[0].module.named_parameters()}
        found[name] = {"results": results, "gradient": gradient, "end": end}
    return shared, found


@pytest.fixture(scope="module")
def two(alone):
    cases = [f"{layout}={','.join(names)}" for layout, names in CASES.items()]
    processes.run("architecture_worker.py", 2, alone[0], str(alone[0]), *cases, meetings=len(cases))
    return [json.loads((alone[0] / f"results-{index}.json").read_text()) for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_loss_norm_gradients_and_weights_after_four_sgd_steps_equal_one_process(alone, two, rank, layout, name):
    shared, want = alone
    for result in two:
        same_losses(want[name]["results"], result[f"{layout} {name}"])
    for what in ("gradient", "end"):
        same_tensors(want[name][what], weights(shared / f"{what}-{layout}-{name}", name, rank))


def test_latent_projections_have_the_names_and_keys_of_transformer_engines(rank):
    (chunk,) = model.build(toy.LATENT, toy.recipe(), rank)
    for name, shape in (("fc1_latent_proj", (24, 40)), ("fc2_latent_proj", (40, 24))):
        shard = chunk.sharded_state_dict()[f"decoder.layers.2.mlp.{name}.weight"]
        assert (shard.key, shard.global_shape) == (f"decoder.layers.2.mlp.{name}.weight", shape)
    assert chunk.decoder.layers[2].mlp.experts.local_experts[0].linear_fc1.weight.shape == (28, 24)
    assert chunk.decoder.layers[2].mlp.shared_experts.linear_fc1.weight.shape == (36, 40)


def test_a_tied_dense_model_trains_its_embedding_from_both_ends(alone):
    gradient = alone[1]["qwen3"]["gradient"]
    assert "output_layer.weight" not in gradient
    unused = torch.ones(128, dtype=torch.bool)
    for row in range(6):
        batch = toy.rows([row])
        unused[batch.ids_BT[0]] = False
    rows = gradient["embedding.word_embeddings.weight"]
    assert unused[:101].any() and (rows[:101][unused[:101]].abs().sum(1) > 0).all()  # through the head alone
    assert rows[101:].count_nonzero() == 0
