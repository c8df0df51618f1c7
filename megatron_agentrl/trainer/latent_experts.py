"""The mixture of latent experts without Transformer Engine: the same layer, with torch's linear for its projections.

In a latent mixture (`moe_latent_size`) every token is projected down before it is sent to its experts and up again
when their outputs are back. megatron-core builds the two projections from Transformer Engine by name and refuses
where that is absent; here they are a plain replicated linear, under the same parameter names and checkpoint keys
(`mlp.fc1_latent_proj.weight`, `mlp.fc2_latent_proj.weight`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer


class ReplicatedLinear(torch.nn.Linear):
    """A linear that every tensor-parallel rank holds whole; takes the arguments of megatron-core's `TELinear`.

    Under sequence parallelism each rank sees its own tokens, so the weight is marked for megatron-core to sum its
    gradient over the tensor-parallel ranks, as it does for norms and the router.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        is_expert: bool,
        name: str | None = None,
    ) -> None:
        if parallel_mode != "duplicated" or bias or skip_weight_param_allocation or is_expert:
            raise ValueError(
                f"{name or 'linear'}: parallel_mode={parallel_mode!r}, bias={bias}, is_expert={is_expert}; only a "
                "replicated linear without bias is computed here; install Transformer Engine for others"
            )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(input_size, output_size, bias=False, device=device, dtype=config.params_dtype)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """input [..., input_size]; returns ([..., output_size], None), the None standing for a bias to add later."""
        return super().forward(input), None


@contextmanager
def _torch_projections() -> Iterator[None]:
    """While a layer is built, what megatron-core finds where it looks for Transformer Engine's linear."""
    present = moe_layer.HAVE_TE, moe_layer.TELinear
    moe_layer.HAVE_TE, moe_layer.TELinear = True, ReplicatedLinear
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = present


class LocalMoELayer(MoELayer):
    """megatron-core's mixture of experts, latent or not, where Transformer Engine is absent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _torch_projections():
            super().__init__(*args, **kwargs)
