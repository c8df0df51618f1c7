"""Tiny random models in Hugging Face folders, with sizes that differ wherever vLLM's CPU kernels allow it."""

import torch
from safetensors.torch import load_file
from transformers import NemotronHConfig, NemotronHForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 272
_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
}


def nemotron_h_moe():
    return NemotronHForCausalLM, NemotronHConfig(
        **_COMMON,
        hidden_size=96,
        layers_block_type=["linear_attention", "full_attention", "moe", "linear_attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=160,
        ssm_state_size=48,
        mamba_num_heads=6,
        mamba_head_dim=32,
        n_groups=2,
        conv_kernel=4,
        chunk_size=64,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=80,
        moe_shared_expert_intermediate_size=112,
        routed_scaling_factor=2.5,
        use_mamba_kernels=False,
    )


def qwen3_moe_tied():
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **_COMMON,
        hidden_size=64,
        intermediate_size=192,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )


class Versions:
    """One architecture under several random weights. `folder(v)` exists for each v; `logprobs` computes in float32."""

    def __init__(self, root, make, count):
        model_class, config = make()
        self._models = []
        self.root = root
        for version in range(count):
            torch.manual_seed(version)
            model = model_class(config).float().eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.ndim >= 2 and "conv" not in name:
                        parameter.normal_(0, 0.08)
                for name, buffer in model.named_buffers():
                    if "e_score_correction_bias" in name:
                        buffer.normal_(0, 0.05)
            model.save_pretrained(self.folder(version))
            self._models.append(model)

    def folder(self, version):
        return str(self.root / f"v{version}")

    def tensors(self, version):
        return load_file(f"{self.folder(version)}/model.safetensors")

    @torch.no_grad()
    def logprobs(self, version, token_ids):
        """ln p(token_ids[t] | token_ids[:t]) for t = 1 … len−1."""
        ids_T = torch.tensor(token_ids)
        logits_TV = self._models[version](ids_T[None]).logits[0].float()
        return logits_TV[:-1].log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].tolist()
