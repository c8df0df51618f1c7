"""Types of weights, gradients and optimizer state; fp16's loss scale; equal gradients under recompute."""

from __future__ import annotations

import json

import pytest
import torch
import trainer_toy as toy

from megatron_agentrl.recipe.schema import Dtype, GradientDtype, Memory, Precision, Recipe, Recompute, RecomputeMethod
from megatron_agentrl.trainer import checkpoint, loss_scale, model, optimizer, topology
from megatron_agentrl.trainer.optimizer import parts
from megatron_agentrl.trainer.random_init import random_tensors, write_random
from megatron_agentrl.trainer.step import NonFiniteGradient, train_step
from megatron_agentrl.trainer.weights_io import load_hf


def recipe(dtype: Dtype = Dtype.fp32, precision: Precision | None = None, memory: Memory | None = None) -> Recipe:
    made = toy.recipe()
    made.model.dtype = dtype
    made.precision, made.memory = precision or Precision(), memory or Memory()
    return made


def build(rank, made: Recipe, name: str = "nemotron"):
    topology.seed_everything(3)
    chunks = optimizer.wrap(model.build(toy.MODELS[name], made, rank), toy.ADAM, made)
    return chunks, optimizer.build(chunks, toy.ADAM, made)


def steps(chunks, opt, count: int, first: int = 1, loss=toy.negative_logprob):
    return [
        train_step(chunks, opt, [toy.rows(range(6))], loss, lr=1e-2, tokens=toy.TOKENS, step=k)
        for k in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def fp32_run(rank):
    found = {}
    for name in toy.MODELS:
        chunks, opt = build(rank, recipe(), name)
        results = steps(chunks, opt, 1)
        gradient = torch.cat([p.main_grad.flatten() for p in chunks[0].parameters()])
        found[name] = ([r.loss for r in results + steps(chunks, opt, 3, 2)], results[0].grad_norm, gradient)
    return found


@pytest.mark.parametrize("name", toy.MODELS)
@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.fp16])
def test_half_types_follow_fp32_within_their_rounding_and_keep_state_in_fp32(rank, fp32_run, dtype, name):
    chunks, opt = build(rank, recipe(dtype), name)
    results = steps(chunks, opt, 4)
    losses, norm, _ = fp32_run[name]
    # 38 tokens whose logits are rounded to 8 (bf16) or 11 (fp16) bits: 1e-3 on the first loss, a few steps' drift after it
    assert results[0].loss == pytest.approx(losses[0], rel=1e-3)
    assert results[0].grad_norm == pytest.approx(norm, rel=5e-3)
    assert [r.loss for r in results] == pytest.approx(losses, rel=2e-2)

    half = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16}[dtype]
    for key, parameter in chunks[0].module.named_parameters():
        fp32 = key.endswith(("A_log", ".D", "dt_bias"))
        assert parameter.dtype == (torch.float32 if fp32 else half), key
        assert parameter.main_grad.dtype == torch.float32, key
    for part in parts(opt):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                assert master.dtype == torch.float32
                assert {part.optimizer.state[master][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.fp16])
def test_float32_parameters_are_read_from_a_folder_without_rounding(rank, tmp_path, dtype):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(toy.NEMOTRON))
    write_random(tmp_path / "weights", folder, seed=5)
    chunks = model.build(toy.NEMOTRON, recipe(dtype), rank)
    load_hf(chunks, toy.NEMOTRON, tmp_path / "weights", rank)
    wrapped = optimizer.wrap(chunks, toy.ADAM, recipe(dtype))
    drawn = dict(random_tensors(toy.NEMOTRON, 5))
    for leaf in ("A_log", "D", "dt_bias"):
        (name,) = [key for key in drawn if key.endswith(f"layers.0.mixer.{leaf}")]
        found = wrapped[0].module.module.decoder.layers[0].mixer.get_parameter(leaf)
        assert torch.equal(found, drawn[name])
    (name,) = [key for key in drawn if key.endswith("layers.0.mixer.dt_bias")]
    assert not torch.equal(drawn[name].to(wrapped[0].module.config.params_dtype).float(), drawn[name])


def test_the_router_computes_in_fp32_in_a_bf16_model(rank):
    chunks, _ = build(rank, recipe(Dtype.bf16))
    routers = [m for m in chunks[0].modules() if type(m).__name__ == "Router"]
    seen = []
    for router in routers:
        gating = router.gating
        router.gating = lambda hidden, gating=gating: seen.append(gating(hidden)) or seen[-1]
    chunks[0](toy.rows((0,)).ids_BT, torch.arange(9)[None], None)
    assert len(seen) == 2
    assert {logits.dtype for logits in seen} == {torch.float32}
    assert {router.expert_bias.dtype for router in routers} == {torch.float32}


def test_bf16_gradients_are_summed_in_bf16_and_stay_near(rank, fp32_run):
    chunks, opt = build(rank, recipe(Dtype.bf16, Precision(gradients=GradientDtype.bf16)))
    result = steps(chunks, opt, 1)[0]
    kinds = {p.main_grad.dtype for p in chunks[0].parameters() if p.dtype == torch.bfloat16}
    assert kinds == {torch.bfloat16}
    assert result.grad_norm == pytest.approx(fp32_run["nemotron"][1], rel=2e-2)


# ---- fp16 -------------------------------------------------------------------------------------------------------


def test_an_overflowing_step_is_repeated_at_half_the_scale_until_it_is_applied(rank, fp32_run):
    chunks, opt = build(rank, recipe(Dtype.fp16, Precision(loss_scale=2.0**18)))
    result = steps(chunks, opt, 1)[0]
    assert result.applied
    assert result.overflows >= 3  # the head's gradient, about 1 a token, leaves fp16 at 2 ** 16
    assert result.loss_scale == 2.0 ** (18 - result.overflows)
    assert result.grad_norm == pytest.approx(fp32_run["nemotron"][1], rel=5e-3)
    again = build(rank, recipe(Dtype.fp16, Precision(loss_scale=result.loss_scale)))
    calm = steps(*again, 1)[0]
    assert calm.overflows == 0
    assert (calm.loss, calm.grad_norm) == (result.loss, result.grad_norm)
    for a, b in zip(chunks[0].parameters(), again[0][0].parameters(), strict=True):
        assert torch.equal(a, b)  # nothing of the overflowed attempts is left, also not in the moments
    biases = [[r.expert_bias.tolist() for r in optimizer.routers(c)] for c in (chunks, again[0])]
    assert biases[0] == biases[1]
    assert steps(chunks, opt, 1, 2)[0].loss == steps(*again, 1, 2)[0].loss


@pytest.mark.parametrize("dtype", Dtype)
def test_the_applied_gradient_is_the_reported_one_clipped_and_unscaled_once(rank, dtype):
    chunks, opt = build(rank, recipe(dtype))
    result = steps(chunks, opt, 1)[0]
    assert result.grad_norm > toy.ADAM.clip_grad == 1.0 and (result.loss_scale > 1) == (dtype is Dtype.fp16)
    states = [state for part in parts(opt) for state in part.optimizer.state.values()]
    squares = sum(float(state["exp_avg"].double().square().sum()) for state in states)
    assert squares**0.5 == pytest.approx(0.1, rel=1e-4)  # (1 - beta1) times a gradient of norm 1


def test_the_scale_doubles_after_its_window_once_a_step(rank):
    chunks, opt = build(rank, recipe(Dtype.fp16, Precision(loss_scale=16.0, loss_scale_window=2)))
    assert [r.loss_scale for r in steps(chunks, opt, 5)] == [16.0, 16.0, 32.0, 32.0, 64.0]


def test_all_parts_of_the_optimizer_have_one_scale_that_any_of_them_lowers():
    config = optimizer.optimizer_config(toy.ADAM, recipe(Dtype.fp16, Precision(loss_scale=64.0)))
    dense, experts = type("Part", (), {})(), type("Part", (), {})()
    loss_scale.share([dense, experts], config)
    for found_inf in (False, False), (True, False), (False, True):
        dense.grad_scaler.update(found_inf[0])
        experts.grad_scaler.update(found_inf[1])
        dense.grad_scaler.settle()
        assert dense.grad_scaler.scale == experts.grad_scaler.scale
    assert loss_scale.of([dense, experts]).value == 16.0


def test_an_overflow_at_the_smallest_scale_and_a_loss_that_is_not_finite_end_the_run(rank):
    chunks, opt = build(rank, recipe(Dtype.fp16, Precision(loss_scale=2.0**18, loss_scale_min=2.0**18)))
    before = [p.detach().clone() for p in chunks[0].parameters()]
    with pytest.raises(NonFiniteGradient, match="step 1: the gradient norm is"):
        steps(chunks, opt, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, chunks[0].parameters(), strict=True))

    chunks, opt = build(rank, recipe(Dtype.fp16))
    calls = []

    def poisoned(logprobs, batch):
        calls.append(1)
        return logprobs.sum() * float("nan"), {}

    with pytest.raises(NonFiniteGradient, match="loss nan"):
        steps(chunks, opt, 1, loss=poisoned)
    assert len(calls) == 1  # no lower scale helps


def test_a_checkpoint_keeps_the_scale_and_its_progress(rank, tmp_path):
    made = recipe(Dtype.fp16, Precision(loss_scale=16.0, loss_scale_window=3))
    chunks, opt = build(rank, made)
    steps(chunks, opt, 4)
    folder = checkpoint.save(tmp_path, chunks, opt, 4, {})
    assert json.loads((folder / "complete.json").read_text())["loss_scale"] == {"scale": 32.0, "growth": 1}
    whole = steps(chunks, opt, 3, 5)
    other = build(rank, made)
    checkpoint.load(folder, *other)
    again = steps(*other, 3, 5)
    assert [r.loss_scale for r in whole] == [r.loss_scale for r in again] == [32.0, 32.0, 64.0]
    assert [r.loss for r in whole] == [r.loss for r in again]


def test_a_checkpoint_of_mixed_types_gives_each_parameter_its_own_state(rank, tmp_path):
    """Mamba's float32 parameters stand beside bf16 ones in one group of the optimizer."""
    chunks, opt = build(rank, recipe(Dtype.bf16))
    steps(chunks, opt, 2)
    folder = checkpoint.save(tmp_path, chunks, opt, 2, {})
    other = build(rank, recipe(Dtype.bf16))
    checkpoint.load(folder, *other)
    for one, two in zip(parts(opt), parts(other[1]), strict=True):
        for left, right in zip(one.optimizer.param_groups, two.optimizer.param_groups, strict=True):
            for a, b in zip(left["params"], right["params"], strict=True):
                assert torch.equal(a, b)
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(one.optimizer.state[a][key], two.optimizer.state[b][key])
    assert [r.loss for r in steps(chunks, opt, 2, 3)] == [r.loss for r in steps(*other, 2, 3)]


# ---- recompute --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("nemotron", Memory(recompute=Recompute.full)),
        ("nemotron", Memory(recompute=Recompute.full, recompute_layers=4)),
        ("nemotron", Memory(recompute=Recompute.full, recompute_method=RecomputeMethod.block, recompute_layers=3)),
        ("qwen", Memory(recompute=Recompute.full)),
        *(
            ("nemotron", Memory(recompute=Recompute.selective, recompute_modules=module))
            for module in ("core_attn", "mlp", "moe", "shared_experts", "layernorm")
        ),
        ("qwen", Memory(recompute=Recompute.selective, recompute_modules="core_attn,layernorm")),
    ],
)
def test_recompute_changes_no_gradient_and_no_router_bias(rank, fp32_run, name, memory):
    saved: list[int] = []
    chunks, opt = build(rank, recipe(memory=memory), name)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):
        result = steps(chunks, opt, 1)[0]
    losses, norm, gradient = fp32_run[name]
    found = torch.cat([p.main_grad.flatten() for p in chunks[0].parameters()])
    assert result.loss == losses[0]
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    assert float((found - gradient).norm() / gradient.norm()) < 1e-6
    assert [r.loss for r in steps(chunks, opt, 3, 2)] == pytest.approx(losses[1:], rel=1e-5)
    assert saved


def test_full_recompute_keeps_fewer_bytes_for_the_backward_pass(rank):
    """Bytes that autograd holds between the forward and the backward pass of one micro-batch."""
    held = {}
    for what, memory in (
        ("none", Memory()),
        ("moe", Memory(recompute=Recompute.selective, recompute_modules="moe")),
        ("full", Memory(recompute=Recompute.full, recompute_layers=6)),
    ):
        chunks, _ = build(rank, recipe(memory=memory))
        storages: dict[int, int] = {}

        def keep(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        batch = toy.rows(range(6))
        chunks[0].train()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            chunks[0](batch.ids_BT, torch.arange(batch.ids_BT.shape[1]).expand_as(batch.ids_BT).contiguous(), None)
        weights = {p.untyped_storage().data_ptr() for p in chunks[0].parameters()}
        held[what] = sum(size for at, size in storages.items() if at not in weights)
    assert held["full"] < held["moe"] < held["none"]
    assert held["full"] < 0.3 * held["none"]


def test_grouped_experts_activation_is_refused_in_megatron_cores_words(rank):
    with pytest.raises(ValueError, match="moe_act in recompute_modules is only supported with moe_grouped_gemm"):
        build(rank, recipe(memory=Memory(recompute=Recompute.selective, recompute_modules="moe_act")))


def test_an_optimizer_on_the_host_is_refused_where_there_is_no_gpu(rank):
    with pytest.raises(ValueError, match="memory.optimizer_offload: there is no GPU"):
        build(rank, recipe(memory=Memory(optimizer_offload=0.5)))
