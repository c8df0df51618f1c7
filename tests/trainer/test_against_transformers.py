"""Logits of megatron-core against transformers on the same weights, and the way back to disk, bit for bit.

A new architecture is one entry of CASES, another way to run rows through the trainer's model one of FORWARDS.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import trainer_toy as toy
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_agentrl.recipe.model_rules import model_problems
from megatron_agentrl.trainer import model
from megatron_agentrl.trainer.weights_io import iterate_hf, load_hf, read_config, save_hf

LENGTHS = (19, 7, 13, 2)
VOCABULARY = 101
#: Dimensions differ wherever they may, so that a swapped axis cannot pass.
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 52, "head_dim": 12,
          "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
ATTENTION = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "norm_topk_prob": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


def nemotron(**changes) -> NemotronHConfig:
    kinds = ["linear_attention", "full_attention", "moe", "linear_attention", "mlp", "moe"]
    sizes = {
        "layers_block_type": kinds, "num_attention_heads": 4, "num_key_value_heads": 2, "ssm_state_size": 16,
        "mamba_num_heads": 6, "mamba_head_dim": 14, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
        "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
        "moe_shared_expert_intermediate_size": 36, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    return NemotronHConfig(**COMMON, **sizes | changes)


def qwen3_moe(**changes) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**COMMON, **ATTENTION, **EXPERTS | changes)


def qwen3(**changes) -> Qwen3Config:
    return Qwen3Config(**COMMON, **ATTENTION, **changes)


def llama(**changes) -> LlamaConfig:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}  # LlamaConfig wants heads that divide the hidden size
    return LlamaConfig(**COMMON, **ATTENTION | heads | changes)


def deepseek_v3(**changes) -> DeepseekV3Config:
    sizes = {
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
        "moe_intermediate_size": 28,
    }  # fmt: skip
    return DeepseekV3Config(**{key: COMMON[key] for key in COMMON if key != "head_dim"}, **sizes | changes)


CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "nemotron_h": nemotron,
    "nemotron_h latent": lambda: nemotron(moe_latent_size=24),
    "nemotron_h without experts": lambda: nemotron(layers_block_type=["linear_attention", "mlp", "full_attention"]),
    "nemotron_h expert groups": lambda: nemotron(n_group=3, topk_group=2, num_experts_per_tok=4, conv_kernel=3),
    "nemotron_h one expert": lambda: nemotron(num_experts_per_tok=1, norm_topk_prob=False, layer_norm_epsilon=1e-3),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe full softmax": lambda: qwen3_moe(norm_topk_prob=False, mlp_only_layers=[1]),
    "qwen3_moe every second layer": lambda: qwen3_moe(decoder_sparse_step=2, tie_word_embeddings=True),
    "qwen3_moe linear rope": lambda: qwen3_moe(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "deepseek_v3": deepseek_v3,
    "deepseek_v3 without a query latent": lambda: deepseek_v3(q_lora_rank=None, n_group=1, topk_group=1),
    "qwen3": qwen3,
    "qwen3 tied": lambda: qwen3(tie_word_embeddings=True, rms_norm_eps=1e-3),
    "llama": llama,
    "llama rope of llama 3": lambda: llama(rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama head_dim by division": lambda: LlamaConfig(
        **COMMON | {"head_dim": None}, num_hidden_layers=2, num_attention_heads=5
    ),
}


def right_padded(chunk, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """One batch; attention, convolution and scan are causal, so that what follows a row cannot reach it."""
    ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    positions_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT).contiguous()
    logits_BTV = chunk(ids_BT, positions_BT, None)
    return [logits_TV[: len(row)] for logits_TV, row in zip(logits_BTV, rows, strict=True)]


FORWARDS = {"right-padded": right_padded}


class Pair(NamedTuple):
    folder: Path  # what transformers saved
    theirs: list[torch.Tensor]  # logits of each row, computed alone
    chunks: list
    hf: dict


ROWS = [torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


@torch.no_grad()
def scatter(theirs: torch.nn.Module) -> None:
    """Move every weight away from its neutral start, so that none is without effect."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
        spread = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(spread * tensor.shape[-1] ** -0.5 * (0.5 if "embed" in name else 1.0))
        elif "e_score_correction_bias" in name:
            tensor.copy_(0.3 * spread)
        elif tensor.numel() and "inv_freq" not in name:
            tensor.add_(0.3 * spread)


@pytest.fixture(scope="module", params=CASES)
def pair(request, rank, tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(CASES[request.param](), attn_implementation="eager").float().eval()
    scatter(theirs)
    theirs.save_pretrained(folder)
    for module in theirs.modules():
        if hasattr(module, "time_step_limit"):
            # transformers clamps Mamba's time steps from below at time_step_min, which the config means for their
            # initial values only; megatron-core and vLLM follow the config's time_step_limit, (0, inf).
            module.time_step_limit = (0.0, float("inf"))
    with torch.no_grad():
        logits = [theirs(row[None], use_cache=False).logits[0] for row in ROWS]
    hf = read_config(folder)
    chunks = model.build(hf, toy.recipe(), rank)
    load_hf(chunks, hf, folder, rank)
    return Pair(folder, logits, chunks, hf)


@pytest.mark.parametrize("forward", FORWARDS)
def test_logits_equal_transformers_on_rows_of_different_lengths(pair, forward):
    with torch.no_grad():
        ours = FORWARDS[forward](pair.chunks[0].eval(), ROWS)
    for got, want in zip(ours, pair.theirs, strict=True):
        assert want.std() > 0.2
        torch.testing.assert_close(got[:, :VOCABULARY], want, rtol=0, atol=1e-4)


def test_what_transformers_writes_has_no_unknown_key(pair):
    assert list(model_problems(pair.hf)) == []


def test_an_export_has_every_tensor_bit_equal_and_every_other_file(pair, rank, tmp_path):
    others = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "LICENSE": "terms", "README.md": "# card",
              "additional_chat_templates/tool_use.jinja": "{{ tools }}"}  # fmt: skip
    for name, text in others.items():
        (pair.folder / name).parent.mkdir(exist_ok=True)
        (pair.folder / name).write_text(text)
    save_hf(tmp_path / "export", pair.folder, iterate_hf(pair.chunks, pair.hf, rank, torch.float32))
    source, export = (load_file(folder / "model.safetensors") for folder in (pair.folder, tmp_path / "export"))
    assert set(source) == set(export)
    assert [name for name in source if not source[name].equal(export[name])] == []
    kept = {str(path.relative_to(pair.folder)) for path in pair.folder.rglob("*") if path.is_file()}
    found = {str(path.relative_to(tmp_path / "export")) for path in (tmp_path / "export").rglob("*") if path.is_file()}
    assert kept <= found
    for name, text in others.items():
        assert (tmp_path / "export" / name).read_text() == text
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == pair.hf
