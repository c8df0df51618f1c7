"""Multi-token-prediction heads: the model that has them, and their loss.

Head k (from 1) reads the last hidden state of position t and the embedding of token t + k, and predicts token
t + k + 1. Two things are done otherwise than in megatron-core 0.19.2, whose `process_mtp_loss` normalises by the
tokens of one micro-batch, counts padding columns of the vocabulary and knows no mask but the one over positions: the
loss here is a sum over the *trained* tokens, divided by the tokens of the global batch like every other, and the
heads run only where a gradient is wanted, so a forward for logprobs costs nothing more.

Where a head's ids and labels lie is said by layouts made for it (`sequence_layout`, `ahead`), from whole rows before they
are packed or cut; megatron-core would shift its parent's ids on the ranks.

Shapes: B rows, T tokens, R input rows and L positions of one rank (as in `sequence_layout`), H hidden, V columns held here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_agentrl.trainer.sequence_layout import SequenceLayout


class PredictionHead(MultiTokenPredictionLayer):
    """megatron-core's head, with ids and padding mask taken as they are given: its own, nothing to be shifted.

    0.19.2 shifts the mask like the ids, which marks the last position as real and mixes up the parts of a sequence that
    is cut over tensor-parallel ranks. Padding must not count for the router's bias: see `layers.Router`.
    """

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Any:
        embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        if self.config.mtp_detach_heads:
            embedded = embedded.detach()
        if not hidden_states.requires_grad:  # a recomputed block gives gradients only where an input asks for one
            hidden_states = hidden_states.detach().requires_grad_()
        return input_ids, position_ids, padding_mask, embedded, hidden_states


class MultiTokenModel(HybridModel):
    """HybridModel with prediction heads on its last stage. `config.mtp_detach_heads` cuts them off from the model's
    own gradients: hidden states, embeddings and output layer are then constants to them."""

    mtp_process: bool

    def forward(self, *args: Any, ahead: Sequence[SequenceLayout] = (), **kwargs: Any) -> torch.Tensor:
        """As HybridModel; where `ahead` (a layout for each head) is given, the heads' logits wait in `take`."""
        kept: list[torch.Tensor] = []
        handle = self.decoder.register_forward_hook(lambda _module, _inputs, hidden: kept.append(hidden))
        # The flag also says where a copy of the embedding lies, so it is off for this call only.
        has_heads, self.mtp_process = self.mtp_process, False
        try:
            output = super().forward(*args, **kwargs)
        finally:
            self.mtp_process = has_heads
            handle.remove()
        if has_heads and ahead:
            self._predictions = self._predict(kept[0], ahead)
        return output

    def _predict(self, hidden_LRH: torch.Tensor, ahead: Sequence[SequenceLayout]) -> list[torch.Tensor]:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.config.mtp_detach_heads:
            hidden_LRH = hidden_LRH.detach()
            weight = (self.output_layer.weight if weight is None else weight).detach()
        ranks, rank = (self.tp_group.size(), self.tp_group.rank()) if self.config.sequence_parallel else (1, 0)
        found = []
        for head, layout in zip(self.mtp.layers, ahead, strict=True):
            hidden_LRH, *_ = head(
                input_ids=layout.ids_RL,
                position_ids=layout.positions_RL,
                hidden_states=hidden_LRH,
                attention_mask=None,
                padding_mask=layout.padding_RL.chunk(ranks, 1)[rank],
                packed_seq_params=layout.packed,
                embedding=self.embedding,
            )
            logits_LRV, _ = self.output_layer(hidden_LRH, weight=weight)
            found.append(logits_LRV.transpose(0, 1).contiguous())
        return found

    def take(self) -> list[torch.Tensor]:
        """Logits [R, L, V] of each head from the last forward, once; [] where it ran none."""
        return self.__dict__.pop("_predictions", [])


def head_count(model: torch.nn.Module) -> int:
    """Prediction heads of the (wrapped) model, whichever stage this is."""
    return get_model_config(model).mtp_num_layers or 0


def predictions(model: torch.nn.Module) -> list[torch.Tensor]:
    """What the heads of a (wrapped) model chunk gave in its last forward; [] for a model without."""
    return get_attr_wrapped_model(model, "take")() if head_count(model) else []


def heads_grad_norm(optimizer: Any) -> float | None:
    """Norm of the gradient of detached heads, which megatron-core leaves out of the optimizer's own and clips apart;
    None where there are none. Collective. 0.19.2 has no public name for it."""
    return optimizer._compute_grad_norms_by_group().get(MTP_GRAD_NORM_GROUP)


def heads_loss(
    predictions: Sequence[torch.Tensor],
    ahead: Sequence[SequenceLayout],
    mask_BT: torch.Tensor | None,
    logprobs: Callable[[torch.Tensor, SequenceLayout], torch.Tensor],
) -> torch.Tensor:
    """Cross entropy of the heads on the trained tokens: a sum over tokens, a mean over heads.

    Args:
        predictions: from `predictions`, not empty.
        ahead: each head's layout.
        mask_BT: which tokens are trained. None for a stand-in micro-batch: 0, but part of the graph, so that backward
            meets the other ranks.
        logprobs: (logits_RLV, layout) -> float32 logprobs_BT, each at the token that was predicted, 0 elsewhere; over
            tensor- and context-parallel ranks and the real vocabulary.
    """
    total = predictions[0].new_zeros((), dtype=torch.float32)
    for logits_RLV, layout in zip(predictions, ahead, strict=True):
        if mask_BT is None:
            total = total + logits_RLV.sum().float() * 0.0
        else:
            total = total - (logprobs(logits_RLV, layout) * mask_BT).sum()
    return total / len(predictions)
