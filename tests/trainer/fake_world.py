"""Any rank of any world in this one process: megatron-core's real modules over torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import topology
from megatron_agentrl.trainer.topology import Rank


@contextmanager
def as_rank(rank: int, sizes: Topology) -> Iterator[Rank]:
    """This process as rank `rank` of a world that is not there. megatron-core's refusal of the sizes is raised."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
            context_parallel_size=sizes.cp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.etp,
            create_gloo_process_groups=False,
        )
        topology.seed_everything(0)
        yield topology.current("cpu", sizes.vpp, sizes.first_stage_layers, sizes.last_stage_layers)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
