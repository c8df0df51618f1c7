"""One parameter theta = 1 and the per-token loss c * theta, through the real schedule and optimizer."""

from __future__ import annotations

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import ModelType

from megatron_agentrl.recipe.schema import Optimizer
from megatron_agentrl.trainer import optimizer
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.step import train_step
from megatron_agentrl.trainer.topology import Rank

#: Plans of the same ten tokens, c = 1 1 1 | 2 | 4 4 | 0 0 0 0, per data-parallel rank.
ONE = {"one micro-batch": [[1, 1, 1, 2, 4, 4, 0, 0, 0, 0]], "regrouped": [[1, 4], [0, 2, 0, 4, 1], [0, 0, 1]]}
TWO = {
    "as reported": {0: [[1, 1, 1], [2]], 1: [[4, 4], [0, 0, 0, 0]]},
    "unequal counts, filled up": {0: [[1, 1], [1], [2, 4]], 1: [[4, 0, 0, 0, 0], [], []]},
}


class Theta(MegatronModule):
    """A "language model" whose logits do not depend on theta; the loss reads theta itself."""

    def __init__(self) -> None:
        super().__init__(
            TransformerConfig(
                num_layers=1,
                hidden_size=4,
                num_attention_heads=1,
                calculate_per_token_loss=True,
                use_cpu_initialization=True,
                gradient_accumulation_fusion=False,
            )  # fmt: skip
        )
        self.theta = torch.nn.Parameter(torch.ones(()))
        self.logprob_chunk_tokens = 8
        self.true_vocab_size, self.packing = 2, False
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor: object) -> None:
        pass

    def forward(self, ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros(*ids.shape, 2) + 0.0 * self.theta


def micro_batch(cs: list[int]) -> MicroBatch:
    if not cs:
        return MicroBatch(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), {})
    ids = torch.zeros(1, len(cs) + 1, dtype=torch.int64)
    c = torch.tensor([[0.0, *cs]])
    return MicroBatch(ids, torch.tensor([len(cs) + 1]), {"c": c})


def run(plan: list[list[int]]) -> list[float]:
    """[loss, gradient norm, gradient, theta after a step of 0.1]."""
    opt = Optimizer(name="sgd", lr=0.1, clip_grad=0.0)
    chunks = optimizer.wrap([Theta()], opt)
    made = optimizer.build(chunks, opt)
    theta = chunks[0].module.theta

    def loss(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (batch.columns["c"] * theta).sum() + 0.0 * logprobs.sum(), {}

    result = train_step(chunks, made, [micro_batch(cs) for cs in plan], loss, lr=0.1, tokens=10.0)
    return [result.loss, result.grad_norm, float(theta.main_grad), float(theta)]


def theta_cases(rank: Rank) -> dict[str, list[float]]:
    return {name: run(plan[rank.dp]) for name, plan in TWO.items()}
