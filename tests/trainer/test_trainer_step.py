"""The step in one process: global token mean, empty micro-batches, refusals, router bias, reference, schedule."""

from __future__ import annotations

import pytest
import torch
import trainer_theta as theta
import trainer_toy as toy

from megatron_agentrl.recipe.schema import Dtype, Optimizer, Schedule, Topology
from megatron_agentrl.trainer import model, optimizer, topology
from megatron_agentrl.trainer.optimizer import learning_rate
from megatron_agentrl.trainer.step import NonFiniteGradient, forward_logprobs, train_step


@pytest.mark.parametrize("case", theta.ONE)
def test_token_mean_is_1_3_in_any_grouping(rank, case):
    assert theta.run(theta.ONE[case]) == pytest.approx([1.3, 1.3, 1.3, 0.87], abs=1e-6)


@pytest.mark.parametrize("name", toy.MODELS)
def test_micro_batches_padding_and_empty_ones_do_not_change_the_gradient(rank, name):
    found = []
    for plan in ([range(6)], [(0,), (1, 2), (), (3, 4, 5)], [(5, 3), (4, 1), (0, 2)]):
        chunks, opt = toy.build(name, rank, toy.SGD)
        result = train_step(
            chunks, opt, [toy.rows(list(p)) for p in plan], toy.negative_logprob, lr=0.1, tokens=toy.TOKENS
        )
        found.append((result, [p.main_grad.clone() for p in chunks[0].parameters()]))
    want, gradient = found[0]
    assert want.metrics == {"tokens": 38.0}
    for result, other in found[1:]:
        assert (result.loss, result.grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=1e-5)
        for a, b in zip(gradient, other, strict=True):
            assert (a - b).abs().max() <= 1e-5 * a.abs().max()


def test_tokens_that_are_not_in_the_micro_batches_still_count(rank):
    losses = []
    for tokens in (38.0, 76.0):
        chunks, opt = toy.build("qwen", rank, toy.SGD)
        result = train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=0.1, tokens=tokens)
        losses.append((result.loss, result.grad_norm))
    assert losses[1] == pytest.approx((losses[0][0] / 2, losses[0][1] / 2), rel=1e-5)


def test_a_step_of_empty_micro_batches_changes_nothing(rank):
    chunks, opt = toy.build("nemotron", rank, toy.SGD)
    before = [p.detach().clone() for p in chunks[0].parameters()]
    result = train_step(chunks, opt, [toy.rows([])], toy.negative_logprob, lr=0.1, tokens=5.0)
    assert (result.loss, result.grad_norm, result.metrics) == (0.0, 0.0, {})
    assert all(torch.equal(a, b) for a, b in zip(before, chunks[0].parameters(), strict=True))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_gradient_that_is_not_finite_is_not_applied_and_names_the_step(rank, name):
    opt_recipe = Optimizer(name=name, lr=0.1, router_bias_rate=1e-3)
    chunks, opt = toy.build("nemotron", rank, opt_recipe)
    before = {k: v.clone() for k, v in chunks[0].module.state_dict().items() if torch.is_tensor(v)}

    def poisoned(logprobs, batch):
        return logprobs.sum() * float("nan"), {}

    with pytest.raises(NonFiniteGradient, match="step 17: the gradient norm is nan"):
        train_step(chunks, opt, [toy.rows(range(6))], poisoned, lr=0.1, tokens=38.0, step=17)
    after = chunks[0].module.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    good = train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=0.1, tokens=38.0, step=18)
    assert good.applied and good.loss == pytest.approx(4.63, abs=0.05)


def test_a_step_needs_tokens_and_micro_batches(rank):
    chunks, opt = toy.build("qwen", rank, toy.SGD)
    with pytest.raises(ValueError, match="step 4: tokens=0"):
        train_step(chunks, opt, [toy.rows((0,))], toy.negative_logprob, lr=0.1, tokens=0, step=4)
    with pytest.raises(ValueError, match="between 0 and 0 micro-batches"):
        train_step(chunks, opt, [], toy.negative_logprob, lr=0.1, tokens=1)


def test_router_bias_moves_by_the_sign_rule_without_padding_and_stands_still_at_rate_0(rank):
    moved = []
    for plan in ([range(6)], [(3, 4), (0, 1, 2, 5)]):  # other padding, the same tokens
        chunks, opt = toy.build("nemotron", rank, Optimizer(name="sgd", router_bias_rate=0.25))
        counts = []
        routers = optimizer.routers(chunks)
        for router in routers:
            router.register_forward_hook(
                lambda module, given, out, counts=counts: counts.append((module, out[1][~given[1].reshape(-1)].sum(0)))
            )
        train_step(chunks, opt, [toy.rows(list(p)) for p in plan], toy.negative_logprob, lr=0.0, tokens=38.0)
        for router in routers:
            count = sum(c for module, c in counts if module is router).float()
            assert count.sum() == 38 * 3  # 44 tokens in 6 rows, less the last of each row
            assert torch.equal(router.expert_bias, 0.25 * torch.sign(count.mean() - count))
        moved.append([router.expert_bias.clone() for router in routers])
        optimizer.set_router_bias_rate(chunks, 0.0)
        train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=0.0, tokens=38.0)
        for router, bias in zip(routers, moved[-1], strict=True):
            assert torch.equal(router.expert_bias, bias)
            assert float(router.local_tokens_per_expert.sum()) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(*moved, strict=True))


def test_forward_logprobs_is_the_training_path_and_aligns_with_the_ids(rank):
    chunks, opt = toy.build("nemotron", rank, toy.SGD)
    seen = []

    def keep(logprobs, batch):
        seen.append(logprobs.detach().clone())
        return toy.negative_logprob(logprobs, batch)

    batches = [toy.rows((0, 1)), toy.rows([]), toy.rows((2,))]
    ahead = forward_logprobs(chunks, batches, temperature=0.7)
    ids = batches[2].ids_BT  # a row alone: position t of its logits predicts token t + 1
    logits = chunks[0](ids[:, :-1], torch.arange(4)[None], None)[..., :101]
    want = (logits / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.equal(ahead[2][:, 1:], want)
    train_step(chunks, opt, batches, keep, lr=0.1, tokens=38.0, temperature=0.7)
    assert [tuple(lp.shape) for lp in ahead] == [(2, 9), (0, 0), (1, 5)]
    assert torch.equal(ahead[0], seen[0]) and torch.equal(ahead[2], seen[1])
    assert ahead[0][:, 0].tolist() == [0.0, 0.0] and ahead[0][1, 7:].tolist() == [0.0, 0.0]


def test_clip_scales_the_step_and_reports_the_norm_before_it(rank):
    moved = []
    for clip in (0.0, 0.5):
        chunks, opt = toy.build("qwen", rank, Optimizer(name="sgd", clip_grad=clip))
        before = [p.detach().clone() for p in chunks[0].parameters()]
        result = train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=1.0, tokens=38.0)
        norm = sum(float((a - b).square().sum()) for a, b in zip(before, chunks[0].parameters(), strict=True)) ** 0.5
        moved.append((result.grad_norm, norm))
    assert moved[0][0] == pytest.approx(moved[1][0]) == pytest.approx(moved[0][1], rel=1e-4)
    assert moved[1][1] == pytest.approx(0.5, rel=1e-3)


def test_learning_rate_by_hand():
    warm = Optimizer(lr=2.0, warmup_steps=4)
    assert [learning_rate(warm, k, 10) for k in (1, 2, 4, 5, 10)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    line = Optimizer(lr=2.0, warmup_steps=2, schedule=Schedule.linear, min_lr_fraction=0.1)
    assert [learning_rate(line, k, 6) for k in range(1, 7)] == pytest.approx([1.0, 2.0, 1.55, 1.1, 0.65, 0.2])
    half = Optimizer(lr=2.0, schedule=Schedule.cosine)
    assert [learning_rate(half, k, 5) for k in (1, 3, 5)] == pytest.approx([2.0, 1.0, 0.0])
    assert learning_rate(Optimizer(lr=3.0, schedule=Schedule.linear), 1, 1) == 0.0
    with pytest.raises(ValueError, match="from 1"):
        learning_rate(warm, 0, 10)


def test_bf16_keeps_the_scans_decay_in_float32_and_learns(rank):
    made = toy.recipe()
    made.model.dtype = Dtype.bf16
    topology.seed_everything(3)
    chunks = optimizer.wrap(model.build(toy.NEMOTRON, made, rank), toy.ADAM)
    opt = optimizer.build(chunks, toy.ADAM)
    types = {
        name.rsplit(".", 1)[-1]: p.dtype for name, p in chunks[0].module.module.named_parameters() if "mixer" in name
    }
    assert {types[n] for n in ("A_log", "D", "dt_bias")} == {torch.float32} and types["conv1d_bias"] == torch.bfloat16
    losses = [
        train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=1e-2, tokens=38.0, step=k).loss
        for k in range(1, 5)
    ]
    assert losses[0] == pytest.approx(4.63, abs=0.05) and losses[-1] < losses[0] - 0.5
    assert {types[n] for n in ("A_log", "D", "dt_bias")} == {torch.float32}


@pytest.mark.parametrize(
    ("topo", "words"),
    [
        (Topology(world=3, tp=2), "tp·pp·cp = 2·1·1 = 2 does not divide"),
        (Topology(world=2, ep=4), "etp·ep·pp = 1·4·1 = 4 does not divide"),
        (Topology(world=2, vpp=2), "vpp=2: needs"),
        (Topology(world=2, sequence_parallel=True), "sequence_parallel=true: needs"),
    ],
)
def test_topologies_that_cannot_be_are_refused(topo, words):
    with pytest.raises(ValueError, match=words):
        topology.check(topo)


def test_the_environment_must_fit_the_recipe():
    with pytest.raises(ValueError, match="WORLD_SIZE=1 but topology.world=2"):
        topology.init(Topology(world=2), seed=0)
