"""Multi-token-prediction heads: the model that has them, and their loss.

Head k (from 1) reads the last hidden state of position t and the embedding of token t + k, and predicts token
t + k + 1. Two things are done otherwise than in megatron-core 0.19.2, whose `process_mtp_loss` normalises by the
tokens of one micro-batch, counts padding columns of the vocabulary and knows no mask but the one over positions: the
loss here is a sum over the *trained* tokens, divided by the tokens of the global batch like every other, and the
heads run only where a gradient is wanted, so a forward for logprobs costs nothing more.

Shapes: B rows, T tokens, S positions (T - 1, padded where the sequence is cut), H hidden, V columns held here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_agentrl.trainer.batch import MicroBatch


class PredictionHead(MultiTokenPredictionLayer):
    """megatron-core's head, with the padding mask taken as it is given.

    0.19.2 shifts it like the ids, which marks the last position as real and mixes up the parts of a sequence that is
    cut over tensor-parallel ranks. Padding must not count for the router's bias: see `layers.Router`.
    """

    def _get_embeddings(self, *args: Any, padding_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        ids, positions, _, embedded, hidden = super()._get_embeddings(*args, padding_mask=None, **kwargs)
        return ids, positions, padding_mask, embedded, hidden


class MultiTokenModel(HybridModel):
    """HybridModel with prediction heads on its last stage. `config.mtp_detach_heads` cuts them off from the model's
    own gradients: hidden states, embeddings and output layer are then constants to them."""

    mtp_process: bool

    def forward(self, *args: Any, lengths_B: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """As HybridModel; where `lengths_B` (tokens of each row) is given, the heads' logits wait in `take`."""
        kept: list[torch.Tensor] = []
        handle = self.decoder.register_forward_hook(lambda _module, _inputs, hidden: kept.append(hidden))
        # The flag also says where a copy of the embedding lies, so it is off for this call only.
        has_heads, self.mtp_process = self.mtp_process, False
        try:
            output = super().forward(*args, **kwargs)
        finally:
            self.mtp_process = has_heads
            handle.remove()
        if has_heads and lengths_B is not None:
            ids_BS, positions_BS = args[:2]
            self._predictions = self._predict(kept[0], ids_BS, positions_BS, lengths_B)
        return output

    def _predict(
        self, hidden_SBH: torch.Tensor, ids_BS: torch.Tensor, positions_BS: torch.Tensor, lengths_B: torch.Tensor
    ) -> list[torch.Tensor]:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.config.mtp_detach_heads:
            hidden_SBH = hidden_SBH.detach()
            weight = (self.output_layer.weight if weight is None else weight).detach()
        ranks, rank = (self.tp_group.size(), self.tp_group.rank()) if self.config.sequence_parallel else (1, 0)
        rows_BS, found = positions_BS, []
        for depth, head in enumerate(self.mtp.layers, 1):
            padding_BS = rows_BS >= lengths_B[:, None] - 1 - depth  # no token there to be predicted from position t
            hidden_SBH, ids_BS, positions_BS, _ = head(
                input_ids=ids_BS,
                position_ids=positions_BS,
                hidden_states=hidden_SBH,
                attention_mask=None,
                padding_mask=padding_BS.chunk(ranks, 1)[rank],
                embedding=self.embedding,
            )
            logits_SBV, _ = self.output_layer(hidden_SBH, weight=weight)
            found.append(logits_SBV.transpose(0, 1).contiguous())
        return found

    def take(self) -> list[torch.Tensor]:
        """Logits [B, S, V] of each head from the last forward, once; [] where it ran none."""
        return self.__dict__.pop("_predictions", [])


def has_heads(model: torch.nn.Module) -> bool:
    """Whether the (wrapped) model, on whichever stage, is built with prediction heads."""
    return bool(get_model_config(model).mtp_num_layers)


def predictions(model: torch.nn.Module) -> list[torch.Tensor]:
    """What the heads of a (wrapped) model chunk gave in its last forward; [] for a model without."""
    return get_attr_wrapped_model(model, "take")() if has_heads(model) else []


def heads_grad_norm(optimizer: Any) -> float | None:
    """Norm of the gradient of detached heads, which megatron-core leaves out of the optimizer's own and clips apart;
    None where there are none. Collective. 0.19.2 has no public name for it."""
    return optimizer._compute_grad_norms_by_group().get(MTP_GRAD_NORM_GROUP)


def heads_loss(
    predictions: list[torch.Tensor],
    batch: MicroBatch,
    logprobs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    counted: bool,
) -> torch.Tensor:
    """Cross entropy of the heads on the trained tokens: a sum over tokens, a mean over heads.

    Args:
        predictions: from `predictions`, not empty.
        batch: its column `mask` says which tokens are trained; token j is head k's label at position j - k - 1.
        logprobs: (logits_BTV, ids_BT) -> float32 logprobs_BT, over tensor-parallel ranks and the real vocabulary.
        counted: False for a stand-in micro-batch: 0, but part of the graph, so that backward meets the other ranks.
    """
    total = predictions[0].new_zeros((), dtype=torch.float32)
    for depth, logits_BSV in enumerate(predictions, 1):
        ids_BT = batch.ids_BT[:, 1 + depth :]
        if counted and ids_BT.shape[1]:
            mask_BT = batch.columns["mask"][:, 1 + depth :]
            total = total - (logprobs(logits_BSV[:, : ids_BT.shape[1]], ids_BT) * mask_BT).sum()
        else:
            total = total + logits_BSV.sum().float() * 0.0
    return total / len(predictions)
