"""This rank's chunks of megatron-core's HybridModel, from a Hugging Face config and a recipe.

Heads for multi-token prediction are built where the recipe trains them; elsewhere `trainer.weights_io` carries them
over. Weights are not read here: a built model holds megatron-core's own initialisation.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_agentrl.layout.megatron import heads_pattern, padded_vocabulary, split_layers
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.trainer.architectures import architecture
from megatron_agentrl.trainer.config import transformer_config
from megatron_agentrl.trainer.layers import stack_spec
from megatron_agentrl.trainer.mla import whole_latents
from megatron_agentrl.trainer.mtp import MultiTokenModel
from megatron_agentrl.trainer.optimizer import FLOAT32_PARAMETERS
from megatron_agentrl.trainer.topology import Rank


def build(hf: dict[str, Any], recipe: Recipe, rank: Rank) -> list[HybridModel]:
    """Build this rank's model chunks (one, or `topology.vpp` of them) on `rank.device`.

    Logits stay split over tensor-parallel ranks and over the padded vocabulary: `trainer.logprobs` takes
    them as they are. Type is the recipe's; Mamba's A_log, D and dt_bias are float32 in any, and stay so when
    `trainer.optimizer.wrap` wraps the model.

    Raises:
        ValueError: as `architectures.architecture`, `config.transformer_config` and `layers.stack_spec`.
    """
    arch, config = architecture(hf), transformer_config(hf, recipe)
    spec = stack_spec(config, arch.mixer if "M" in arch.pattern else {})
    stages = split_layers(
        len(arch.pattern), rank.pp_size * rank.vpp_size, rank.first_stage_layers, rank.last_stage_layers
    )
    pattern = "|".join(arch.pattern[first:stop] for first, stop in stages)
    if config.mtp_num_layers:
        letters, count = heads_pattern(hf)
        pattern += f"/{letters}" * count
    chunks = []
    for chunk in range(rank.vpp_size):
        stage = chunk if rank.vpp_size > 1 else None
        model = (MultiTokenModel if config.mtp_num_layers else HybridModel)(
            config,
            spec,
            vocab_size=padded_vocabulary(arch.vocab_size, rank.tp_size),
            max_sequence_length=recipe.model.max_length,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type=arch.position,
            rotary_base=arch.rotary_base,
            seq_len_interpolation_factor=arch.rope_linear_factor,
            vp_stage=stage,
        )
        for module in model.modules():
            if type(module).__name__ == "ExtendedRMSNorm":  # the mixer's gated norm has a fixed epsilon
                module.eps = arch.mixer_norm_eps
        if arch.rope_llama3 is not None:  # HybridModel has no argument for it, its rotary embedding has
            model.rotary_pos_emb.inv_freq = model.rotary_pos_emb._apply_scaling(
                model.rotary_pos_emb.inv_freq, **arch.rope_llama3
            )
        for name, parameter in model.named_parameters():
            if name.endswith(FLOAT32_PARAMETERS):  # before weights are read, which would round them
                parameter.data = parameter.data.float()
        model.true_vocab_size, model.packing = arch.vocab_size, recipe.train.packing
        model.logprob_chunk_tokens = recipe.train.logprob_chunk_tokens
        model.whole_latents = whole_latents(spec)
        chunks.append(model.to(rank.device))
    return chunks
