"""Packed rows against padded ones, on one process: loss, gradients, logprobs and router biases do not see the layout."""

from __future__ import annotations

import mtp_toy
import pytest
import torch
import trainer_toy as toy
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_cases import rl_rows

from megatron_agentrl.recipe.schema import Algorithm
from megatron_agentrl.trainer import canary
from megatron_agentrl.trainer.batch import MicroBatch, sft_micro_batch
from megatron_agentrl.trainer.losses import rl_loss
from megatron_agentrl.trainer.optimizer import routers
from megatron_agentrl.trainer.step import forward_logprobs, train_step


@pytest.fixture(scope="module")
def built(rank):
    """name -> chunks and optimizer with frozen weights; a test sets `packing` on the model."""
    return {name: toy.build(name, rank, toy.SGD) for name in toy.MODELS}


def pack(chunks, packing: bool) -> None:
    chunks[0].module.packing = packing


def step(built, name: str, batches: list[MicroBatch], packing: bool, loss=toy.negative_logprob, tokens: float = 30.0):
    chunks, opt = built[name]
    pack(chunks, packing)
    result = train_step(chunks, opt, batches, loss, lr=0.0, tokens=tokens)
    return result, {key: p.main_grad.clone() for key, p in chunks[0].module.named_parameters()}


def same(want, got) -> None:
    """Loss, norm and metrics to 1e-5; every gradient to 1e-5 of its own largest element."""
    assert got[0].loss == pytest.approx(want[0].loss, rel=1e-5)
    assert got[0].grad_norm == pytest.approx(want[0].grad_norm, rel=1e-5)
    assert got[0].metrics == pytest.approx(want[0].metrics, rel=1e-5)
    for key, value in want[1].items():
        assert (got[1][key] - value).abs().max() <= 1e-5 * value.abs().max(), key


@pytest.mark.parametrize("name", toy.MODELS)
def test_packed_equals_padded_in_loss_and_every_gradient(built, name):
    want = step(built, name, [toy.rows(range(6))], packing=False)
    same(want, step(built, name, [toy.rows(range(6))], packing=True))
    assert all(float(gradient.abs().max()) > 0 for gradient in want[1].values())


@pytest.mark.parametrize("name", toy.MODELS)
def test_reinforcement_columns_and_their_metrics_do_not_see_the_layout(built, name):
    loss = rl_loss(Algorithm(kl_coef=0.3))
    found = []
    for packing, plan in ((False, [(0, 1, 2), (3, 4, 5)]), (True, [(0, 1, 2, 3, 4, 5)])):
        pack(built[name][0], packing)
        batches = [rl_rows(rows) for rows in plan]
        for batch, logprobs_BT in zip(batches, forward_logprobs(built[name][0], batches), strict=True):
            batch.columns["reference"] = logprobs_BT * 1.1
        found.append(step(built, name, batches, packing, loss))
    same(*found)
    assert found[0][0].metrics["kl"] > 0


def rows_of(lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    drawn = [torch.Generator().manual_seed(100 * index + length) for index, length in enumerate(lengths)]
    return [
        (torch.randint(0, 101, (n,), generator=generator).tolist(), [1] * n)
        for n, generator in zip(lengths, drawn, strict=True)
    ]


@settings(max_examples=12, deadline=None)
@given(
    data=st.data(), lengths=st.lists(st.integers(1, 24), min_size=1, max_size=7), name=st.sampled_from(list(toy.MODELS))
)
def test_the_result_does_not_depend_on_the_packing_plan(built, data, lengths, name):
    """Any lengths (chunks of the scan are 8 long), any order, any cut into micro-batches, against one row at a time."""
    rows = rows_of([*lengths, 9])
    alone = step(built, name, [sft_micro_batch([row], 0) for row in rows], packing=False)
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows) - 1), max_size=2)))
    plan = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    same(alone, step(built, name, [sft_micro_batch([rows[i] for i in part], 0) for part in plan], packing=True))


@pytest.mark.parametrize("name", toy.MODELS)
def test_nothing_crosses_a_border(built, name):
    """Only the middle row trains. Ids that only its neighbours hold get no gradient: no state, no convolution tap, no
    key and no router carries anything over. (The scan sums decays over a chunk, borders included; what cancels there
    leaves 1e-12 of a gradient at most. Without a reset it would be a tenth.)"""
    rows = [([t % 40 for t in range(11)], [0] * 11), (list(range(60, 73)), [1] * 13), (list(range(40, 52)), [0] * 12)]
    result, gradients = step(built, name, [sft_micro_batch(rows, 0)], packing=True)
    embedding = gradients["embedding.word_embeddings.weight"]
    assert result.metrics["tokens"] == 12.0
    inside = embedding[60:72].abs().amax(1)
    assert embedding[:60].abs().max() <= (0.0 if name == "qwen" else 1e-11 * float(inside.max()))
    assert inside.min() > 0


@pytest.mark.parametrize("packing", [False, True])
def test_padding_never_counts_for_the_expert_bias(rank, packing):
    chunks, opt = toy.build("nemotron", rank, toy.ADAM, packing=packing)
    biases = []
    for plan in ([range(6)], [(0, 1), (), (2, 3, 4, 5)]):
        for router in routers(chunks):
            router.expert_bias.zero_()
        train_step(chunks, opt, [toy.rows(rows) for rows in plan], toy.negative_logprob, lr=0.0, tokens=38.0)
        biases.append(torch.stack([router.expert_bias.clone() for router in routers(chunks)]))
    assert torch.equal(*biases) and biases[0].abs().max() == pytest.approx(1e-3)


def test_canaries_are_scored_by_the_layout_that_trains(built):
    chunks, _ = built["nemotron"]
    found = []
    for packing in (False, True):
        pack(chunks, packing)
        found.append(canary.score(chunks, 101, 24, seed=5))
    assert [row.ids for row in found[0]] == [row.ids for row in found[1]]
    for padded, packed in zip(*found, strict=True):
        assert packed.logprobs == pytest.approx(padded.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None, "rope_parameters": mtp_toy.YARN}], ids=["plain", "yarn, no query latent"]
)
def test_latent_attention_keeps_packed_sequences_apart(rank, monkeypatch, changes):
    """Values are narrower than keys here, so that megatron-core pads them in packed rows and cuts them again."""
    monkeypatch.setitem(mtp_toy.MODELS, "latent", mtp_toy.DEEPSEEK | changes)
    built = {"latent": mtp_toy.build("latent", rank, toy.SGD, train=False)}
    want = step(built, "latent", [toy.rows(range(6))], packing=False)
    same(want, step(built, "latent", [toy.rows(range(6))], packing=True))
    same(want, step(built, "latent", [toy.rows((5, 1, 3)), toy.rows((0, 2, 4))], packing=True))
