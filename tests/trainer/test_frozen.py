"""Reference and teacher: what they score, that the policy is untouched, and that a layout changes nothing."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import frozen_cases as cases
import processes
import pytest
import torch
import trainer_toy as toy
from pytest import approx

from megatron_agentrl.recipe.schema import Dtype, Topology
from megatron_agentrl.recipe.weight_files import WeightsError
from megatron_agentrl.trainer import checkpoint, model, optimizer
from megatron_agentrl.trainer.frozen import OwnPlace, SamePlace, frozen_policies, same_model
from megatron_agentrl.trainer.host_weights import HostWeights
from megatron_agentrl.trainer.step import forward_logprobs, train_step
from megatron_agentrl.trainer.weights_io import load_hf


@pytest.fixture(scope="module")
def shared(rank, tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    cases.write_folders(folder, rank)
    return folder


@pytest.fixture(scope="module")
def alone(shared, rank):
    return cases.step_between(shared, rank, Topology())


def scores(hf, folder, rank) -> list[torch.Tensor]:
    """What a model that is only this folder gives, by itself."""
    chunks = model.build(hf, toy.recipe(), rank)
    load_hf(chunks, hf, folder, rank)
    return forward_logprobs(chunks, cases.batches(rank), cases.TEMPERATURE)


def test_reference_and_teacher_score_as_their_folders_do(shared, rank, alone):
    for column, hf in (("reference", cases.POLICY), ("teacher", cases.TEACHER)):
        for rows, want_BT in zip(cases.PLANS[1][0], scores(hf, shared / column, rank), strict=True):
            for at, row in enumerate(rows):
                assert alone[column][row] == want_BT[at, : toy.LENGTHS[row]].tolist()
        assert alone[f"{column} leaves all as it was"]


def test_both_are_in_force_in_the_step(alone):
    """Loss and metrics, by their formulas from the kept logprobs."""
    loss = kl = reverse = 0.0
    for row in range(6):
        own, reference, teacher = (alone[name][row][1:] for name in ("policy", "reference", "teacher"))
        for log_p, log_ref, log_t in zip(own, reference, teacher, strict=True):
            advantage = 1 - row / 2 + 0.5 * (log_t - log_p)
            ratio = math.exp(log_p + 4.5)
            k3 = math.exp(log_ref - log_p) - 1 + log_p - log_ref
            loss += max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28)) + 0.3 * k3
            kl += k3
            reverse += log_p - log_t
    assert alone["loss"] == approx(loss / 38, rel=1e-5)
    assert alone["metrics"]["kl"] == approx(kl, rel=1e-5) and kl > 0.1
    assert alone["metrics"]["teacher_kl"] == approx(reverse, rel=1e-4) and abs(reverse) > 0.1


FAST, SLOW = ("PP2", "DP2 overlap"), ("TP2", "EP2")  # one start of two processes each


@pytest.fixture(scope="module")
def found(shared, rank):
    """layout -> what each rank found; the layouts of a set are worked through together."""
    kept: dict[str, list[dict]] = {}

    def of(layout: str) -> list[dict]:
        if layout not in kept:
            layouts = FAST if layout in FAST else SLOW
            processes.run("frozen_cases.py", 2, shared, str(shared), *layouts, meetings=len(layouts))
            ranks = [json.loads((shared / f"found-{index}.json").read_text()) for index in range(2)]
            kept.update({name: [rank[name] for rank in ranks] for name in layouts})
        return kept[layout]

    return of


@pytest.mark.parametrize("layout", [*FAST, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW)])
def test_every_layout_gives_the_numbers_of_one_process(alone, found, layout):
    for result in found(layout):
        for column in ("reference", "teacher"):
            assert result[f"{column} leaves all as it was"]
            assert result[column]
            for row, logprobs in result[column].items():
                assert logprobs == approx(alone[column][int(row)], abs=1e-5)
        assert (result["loss"], result["norm"]) == approx((alone["loss"], alone["norm"]), rel=1e-5)
        for name in ("kl", "teacher_kl", "tokens"):
            assert result["metrics"][name] == approx(alone["metrics"][name], rel=1e-5)


@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
def test_present_weights_return_bit_for_bit_also_after_an_error_and_the_host_holds_one_copy(rank, dtype):
    made = toy.recipe()
    made.model.dtype = dtype
    chunks = optimizer.wrap(model.build(toy.NEMOTRON, made, rank), toy.ADAM, made)
    opt = optimizer.build(chunks, toy.ADAM, made)
    data = [toy.rows(range(6))]
    first = forward_logprobs(chunks, data)[0]
    weights = HostWeights(chunks)
    biases = sum(router.expert_bias.nbytes for router in optimizer.routers(chunks))
    assert weights.nbytes == sum(parameter.nbytes for parameter in chunks[0].parameters()) + biases
    for step in range(1, 4):
        train_step(chunks, opt, data, toy.negative_logprob, lr=1e-2, tokens=toy.TOKENS, step=step)
    now, before = forward_logprobs(chunks, data)[0], cases.held(chunks, opt)
    with weights.active(chunks):
        assert torch.equal(forward_logprobs(chunks, data)[0], first) and not torch.equal(first, now)
    with pytest.raises(RuntimeError, match="inside"), weights.active(chunks):
        raise RuntimeError("inside")
    assert all(torch.equal(a, b) for a, b in zip(before, cases.held(chunks, opt), strict=True))
    assert torch.equal(forward_logprobs(chunks, data)[0], now)


def test_weights_of_another_model_are_not_swapped_in(rank):
    weights = HostWeights(toy.build("qwen", rank, toy.SGD)[0])
    with (
        pytest.raises(ValueError, match="tensors of another model"),
        weights.active(toy.build("latent", rank, toy.SGD)[0]),
    ):
        pass


def test_scales_and_histories_of_delayed_fp8_are_as_before_a_pass_with_other_weights(rank):
    """Transformer Engine keeps them in `fp8_meta` of its modules and writes to them in place in any forward pass."""
    chunks, _ = toy.build("llama", rank, toy.SGD)
    linear = chunks[0].module.decoder.layers[0].self_attention.linear_qkv
    state = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3))
    linear.fp8_meta = {"scaling_fwd": state}
    linear.register_forward_hook(lambda *_: (state.scale.mul_(2), state.amax_history[0].fill_(7.0), None)[2])
    with HostWeights(chunks).active(chunks):
        forward_logprobs(chunks, [toy.rows((0,))])
        assert state.scale.tolist() == [2.0] * 3
    assert state.scale.tolist() == [1.0] * 3 and not state.amax_history.any()


def test_a_resumed_run_has_the_same_reference_from_its_start_or_its_folder(shared, rank, tmp_path):
    for path, folder in ((None, "policy"), (str(shared / "reference"), "reference")):
        made = cases.recipe(shared)
        made.algorithm.teacher_coef, made.algorithm.reference_path = 0.0, path
        where = tmp_path / folder
        chunks, opt = cases.build(shared, rank, made)
        first = frozen_policies(made, chunks, cases.POLICY, rank, where, resume=False)
        data = cases.batches(rank)
        train_step(chunks, opt, data, toy.negative_logprob, lr=1e-2, tokens=toy.TOKENS)
        saved = checkpoint.save(where, chunks, opt, 1, {})
        now = forward_logprobs(chunks, data, cases.TEMPERATURE)
        chunks, opt = cases.build(shared, rank, made)
        again = frozen_policies(made, chunks, cases.POLICY, rank, where, resume=True)
        checkpoint.load(saved, chunks, opt)
        assert set(first) == set(again) == {"reference"}
        for left, right, own, want in zip(
            first["reference"].logprobs(data, cases.TEMPERATURE),
            again["reference"].logprobs(data, cases.TEMPERATURE),
            forward_logprobs(chunks, data, cases.TEMPERATURE),
            scores(cases.POLICY, shared / folder, rank),
            strict=True,
        ):
            assert torch.equal(left, right) and torch.equal(right, want)
            assert not torch.equal(own, right)
        assert all(
            torch.equal(a, b) for a, b in zip(now, forward_logprobs(chunks, data, cases.TEMPERATURE), strict=True)
        )


def test_only_what_the_loss_asks_for_is_read_and_a_teacher_of_the_same_model_takes_the_policys_place(shared, rank):
    made = cases.recipe(shared)
    chunks, _ = cases.build(shared, rank, made)
    found = frozen_policies(made, chunks, cases.POLICY, rank, shared / "unused", resume=False)
    assert {key: type(value) for key, value in found.items()} == {"reference": SamePlace, "teacher": OwnPlace}
    made.algorithm.teacher_path = str(shared / "reference")
    found = frozen_policies(made, chunks, cases.POLICY, rank, shared / "unused", resume=False)
    assert isinstance(found["teacher"], SamePlace)
    made.algorithm.kl_coef = made.algorithm.teacher_coef = 0.0
    assert frozen_policies(made, chunks, cases.POLICY, rank, shared / "unused", resume=False) == {}


def test_a_reference_of_another_model_or_without_weights_is_refused(shared, rank, tmp_path):
    made = cases.recipe(shared)
    chunks, _ = cases.build(shared, rank, made)
    made.algorithm.reference_path = made.algorithm.teacher_path
    with pytest.raises(ValueError, match="of another model than the policy's"):
        frozen_policies(made, chunks, cases.POLICY, rank, tmp_path, resume=False)
    (tmp_path / "config.json").write_text(json.dumps(cases.POLICY))
    made.algorithm.reference_path = str(tmp_path)
    with pytest.raises(WeightsError, match="has neither model.safetensors nor"):
        frozen_policies(made, chunks, cases.POLICY, rank, tmp_path, resume=False)
    assert not same_model(cases.POLICY, cases.POLICY | {"routed_scaling_factor": 1.0})
    assert same_model(cases.POLICY, cases.POLICY | {"transformers_version": "5.0"})
