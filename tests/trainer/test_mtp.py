"""Latent attention and multi-token-prediction heads in one process: logits, files, gradients, and what is left alone."""

from __future__ import annotations

import json
import re

import mtp_toy
import pytest
import torch
import trainer_toy as toy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from megatron_agentrl.layout.megatron import hf_tensors
from megatron_agentrl.trainer import model
from megatron_agentrl.trainer.architectures import architecture
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.mtp import heads_loss
from megatron_agentrl.trainer.optimizer import routers
from megatron_agentrl.trainer.sequence_layout import lay_out
from megatron_agentrl.trainer.step import forward_logprobs, train_step
from megatron_agentrl.trainer.weights_io import iterate_hf, load_hf, save_hf


def write(folder, hf, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def positions(rows: int, length: int) -> torch.Tensor:
    return torch.arange(length).expand(rows, -1).contiguous()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
        {"rope_parameters": mtp_toy.YARN, "first_k_dense_replace": 0},
        {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": {"type": "yarn", "factor": 4.0,
         "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}, "n_shared_experts": 1},
    ],
    ids=["plain", "no query latent", "yarn", "older keys"],
)  # fmt: skip
def test_logits_of_latent_attention_equal_transformers_in_rows_of_different_lengths(rank, tmp_path, changes):
    hf = mtp_toy.DEEPSEEK | changes
    folder = write(tmp_path / "hf", hf, mtp_toy.scattered(hf, heads=False))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (chunk,) = model.build(hf, toy.recipe(), rank)
    load_hf([chunk], hf, folder, rank)
    ids = torch.randint(0, 101, (3, 37), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        ours = chunk(ids, positions(3, 37), None)[..., :101]
        for row, length in enumerate((37, 21, 2)):
            want = theirs(input_ids=ids[row : row + 1, :length]).logits[0]
            assert want.std() > 0.1
            torch.testing.assert_close(ours[row, :length], want, rtol=0, atol=1e-4)


def test_a_heads_logits_equal_transformers(rank, tmp_path):
    hf = mtp_toy.DEEPSEEK
    folder = write(tmp_path / "hf", hf, mtp_toy.scattered(hf, heads=True))
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]  # transformers knows the layer of the release
    theirs = MtpModel.from_pretrained(main).eval()
    (chunk,) = model.build(hf, mtp_toy.recipe(), rank)
    load_hf([chunk], hf, folder, rank)
    ids = torch.randint(0, 101, (3, 20), generator=torch.Generator().manual_seed(6))
    at = positions(3, 19)
    with torch.no_grad():
        rows = MicroBatch(ids, torch.tensor([20, 20, 20]), {})
        chunk(ids[:, :-1], at, None, ahead=[lay_out(rows, packing=False, ahead=1)])
        (ours,) = chunk.take()
        embedded = theirs.embed_tokens(ids[:, 1:])
        hidden = theirs.layers[0](
            embedded,
            main.model(input_ids=ids[:, :-1]).last_hidden_state,
            position_embeddings=theirs.rotary_emb(embedded, position_ids=at),
            attention_mask=torch.full((19, 19), float("-inf")).triu(1)[None, None],
            position_ids=at,
            past_key_values=None,
        )
        want = main.lm_head(hidden)
    assert want.std() > 0.1
    torch.testing.assert_close(ours[:, :-1, :101], want[:, :-1], rtol=0, atol=1e-4)  # the last has no next token
    assert chunk.take() == []


@pytest.mark.parametrize("name", mtp_toy.MODELS)
def test_a_folder_with_heads_comes_back_bit_equal_whether_they_are_trained_or_not(rank, tmp_path, name):
    hf = mtp_toy.MODELS[name]
    tensors = dict(mtp_toy.scattered(hf, heads=True))
    if name == "deepseek":  # as released: the shared tables stand in the head's layer once more
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    folder = write(tmp_path / "hf", hf, tensors)
    for kind, recipe in (("kept", toy.recipe()), ("trained", mtp_toy.recipe())):
        (chunk,) = model.build(hf, recipe, rank)
        load_hf([chunk], hf, folder, rank)
        save_hf(tmp_path / kind, folder, iterate_hf([chunk], hf, rank, torch.float32))
        back = load_file(tmp_path / kind / "model.safetensors")
        assert back.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert back[key].equal(tensor), key


def test_copies_of_a_shared_table_follow_it(rank, tmp_path):
    hf = mtp_toy.DEEPSEEK
    tensors = dict(mtp_toy.scattered(hf, heads=True))
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = write(tmp_path / "hf", hf, tensors)
    (chunk,) = model.build(hf, toy.recipe(), rank)
    load_hf([chunk], hf, folder, rank)
    with torch.no_grad():
        chunk.embedding.word_embeddings.weight += 1.0
    save_hf(tmp_path / "out", folder, iterate_hf([chunk], hf, rank, torch.float32))
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back["model.layers.3.embed_tokens.weight"].equal(tensors["model.embed_tokens.weight"] + 1.0)
    assert back["model.layers.3.eh_proj.weight"].equal(tensors["model.layers.3.eh_proj.weight"])


@pytest.mark.parametrize("name", mtp_toy.MODELS)
def test_a_publish_leaves_out_the_heads_whether_they_are_trained_or_not(rank, name):
    hf = mtp_toy.MODELS[name]
    (chunk,) = model.build(hf, mtp_toy.recipe(), rank)
    assert [key for key, _ in iterate_hf([chunk], hf, rank, torch.float32, heads=False)] == list(hf_tensors(hf))
    with_heads = [key for key, _ in iterate_hf([chunk], hf, rank, torch.float32)]
    assert with_heads == list(hf_tensors(hf, heads=True)) and len(with_heads) > len(hf_tensors(hf))


def plain(name, rank, opt):
    return mtp_toy.build(name, rank, opt, train=False)


def steps(chunks, opt, count=3):
    """[loss, norm] of each step, the trunk's first gradient, and all weights after the last."""
    found, batches = [], [toy.rows((0, 1, 2)), toy.rows((3, 4, 5))]
    for step in range(count):
        result = train_step(chunks, opt, batches, toy.negative_logprob, lr=1e-2, tokens=toy.TOKENS, step=step)
        found.append([result.loss, result.grad_norm])
        if step == 0:
            gradient = {key: p.main_grad.clone() for key, p in chunks[0].module.named_parameters()}
    weights = {key: p.detach().clone() for key, p in chunks[0].module.named_parameters()}
    weights |= {f"bias {i}": router.expert_bias.clone() for i, router in enumerate(routers(chunks))}
    return found, gradient, weights


@pytest.mark.parametrize("opt", [toy.SGD, toy.ADAM], ids=["sgd", "adam, clipped"])
@pytest.mark.parametrize("name", mtp_toy.MODELS)
def test_detached_heads_learn_and_leave_the_policy_bit_equal(rank, name, opt):
    """Also under clipping: the heads' gradient has a norm of its own."""
    without, bare_gradient, bare_weights = steps(*plain(name, rank, opt))
    chunks, made = mtp_toy.build(name, rank, opt)
    start = dict(plain(name, rank, opt)[0][0].module.named_parameters())
    with torch.no_grad():  # the output layer is drawn after the heads
        for key, parameter in chunks[0].module.named_parameters():
            if key in start:
                parameter.copy_(start[key])
    made.reload_model_params()
    before = {key: p.detach().clone() for key, p in chunks[0].module.named_parameters()}
    with_heads, gradient, weights = steps(chunks, made)
    assert with_heads == without
    for key, value in bare_gradient.items():
        assert gradient[key].equal(value), key
    for key, value in bare_weights.items():
        assert weights[key].equal(value), key
    heads = [key for key in gradient if key.startswith("mtp.")]
    assert heads and all(gradient[key].any() for key in heads if "local_experts" not in key)
    assert all(not weights[key].equal(before[key]) for key in heads if key.endswith("eh_proj.weight"))


@pytest.mark.parametrize("name", mtp_toy.MODELS)
def test_heads_that_are_not_detached_reach_the_policy(rank, name):
    _, detached, _ = steps(*mtp_toy.build(name, rank, toy.SGD), count=1)
    _, attached, _ = steps(*mtp_toy.build(name, rank, toy.SGD, detach=False), count=1)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_norm.weight"):
        assert not attached[key].equal(detached[key]), key
    for key in attached:
        if key.startswith("mtp."):
            assert attached[key].equal(detached[key]), key


def test_the_heads_gradient_is_that_of_its_own_loss_in_any_grouping_padded_or_packed(rank):
    """Against autograd on a loss written out by hand, over one head whose labels are two tokens ahead."""
    chunks, opt = mtp_toy.build("deepseek", rank, toy.SGD)
    whole = toy.rows(range(6))
    whole.columns["mask"][1, 3] = 0.0  # a token that is not trained is no label either
    chunk = chunks[0].module
    chunk(whole.ids_BT[:, :-1].contiguous(), positions(6, 10), None, ahead=[lay_out(whole, packing=False, ahead=1)])
    (logits,) = chunk.take()
    total = torch.zeros(())
    for row in range(6):
        for j in range(2, int(whole.lengths_B[row])):
            if whole.columns["mask"][row, j]:
                total = total - logits[row, j - 2, :101].log_softmax(-1)[whole.ids_BT[row, j]]
    names = [key for key, _ in chunk.named_parameters() if key.startswith("mtp.")]
    want = torch.autograd.grad(
        0.3 * total / toy.TOKENS, [p for key, p in chunk.named_parameters() if key in names], allow_unused=True
    )

    def rows(which):
        batch = toy.rows(which)
        if 1 in which:
            batch.columns["mask"][list(which).index(1), 3] = 0.0
        return batch

    for grouping, packing in (([range(6)], False), ([(5, 1), (), (0, 2, 3, 4)], False), ([(5, 1, 0), (2, 3, 4)], True)):
        chunks, opt = mtp_toy.build("deepseek", rank, toy.SGD, packing=packing)
        result = train_step(
            chunks, opt, [rows(tuple(which)) for which in grouping], toy.negative_logprob, lr=0.0, tokens=toy.TOKENS
        )
        assert result.metrics["mtp_cross_entropy"] == pytest.approx(float(total), rel=1e-5)
        found = dict(chunks[0].module.named_parameters())
        for key, gradient in zip(names, want, strict=True):
            expected = torch.zeros_like(found[key]) if gradient is None else gradient
            gap = (found[key].main_grad - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
            assert gap < 1e-5, key


def test_two_heads_weigh_half_each():
    batch = MicroBatch(torch.tensor([[0, 1, 1, 0, 1]]), torch.tensor([5]), {})
    mask_BT = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    ahead = [lay_out(batch, packing=False, ahead=depth) for depth in (1, 2)]
    logits = [torch.full((1, 4, 2), 0.0), torch.tensor([[[0.0, 1.0]] * 4])]

    def logprobs(z_RLV, layout):
        return layout.to_rows(z_RLV.log_softmax(-1).gather(-1, layout.targets_RL[..., None])[..., 0])

    # head 1: tokens 2 and 3 at ln 2 each; head 2: token 3 (a 0) at ln(1 + e)
    assert float(heads_loss(logits, ahead, mask_BT, logprobs)) == pytest.approx((2 * 0.693147 + 1.313262) / 2, abs=1e-5)
    assert float(heads_loss(logits, ahead, None, logprobs)) == 0.0


def test_a_forward_for_logprobs_runs_no_head(rank):
    chunks, _ = mtp_toy.build("deepseek", rank, toy.SGD)
    ran = []
    chunks[0].module.mtp.layers[0].register_forward_hook(lambda *_: ran.append(1))
    (logprobs,) = forward_logprobs(chunks, [toy.rows((0, 1))])
    assert logprobs.shape == (2, 9) and not ran


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"n_group": 3, "topk_group": 1}, "found 4 // 1"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type='llama3'"),
        ({"rope_parameters": mtp_toy.YARN | {"mscale": 0}}, "mscale_all_dim=1.2"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace=4"),
    ],
)
def test_what_latent_attention_does_not_compute_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        architecture(mtp_toy.DEEPSEEK | changes)


@pytest.mark.parametrize("name", mtp_toy.MODELS)
def test_heads_have_the_checkpoint_keys_of_megatron_cores_specification(rank, name):
    chunk = model.build(mtp_toy.MODELS[name], mtp_toy.recipe(), rank)[0]
    keys = {value.key for value in chunk.sharded_state_dict().values() if "_extra_state" not in value.key}
    head = "mtp.layers.0."
    experts = {f"{head}mtp_model_layer.layers.1.{key}" for key in (
        "pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias", "mlp.experts.experts.linear_fc1.weight",
        "mlp.experts.experts.linear_fc2.weight", "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight",
    )}  # fmt: skip
    latent = ("input_layernorm.weight", "self_attention.linear_q_down_proj.weight", "self_attention.linear_q_up_proj.weight",
              "self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.linear_kv_down_proj.weight",
              "self_attention.linear_kv_up_proj.weight", "self_attention.linear_kv_up_proj.layer_norm_weight",
              "self_attention.linear_proj.weight")  # fmt: skip
    usual = (
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_proj.weight",
    )
    attention = {f"{head}mtp_model_layer.layers.0.{key}" for key in (latent if name == "deepseek" else usual)}
    own = {head + key for key in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")}
    assert {key for key in keys if key.startswith(head)} == own | attention | experts
    assert ("decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight" in keys) == (name == "deepseek")
