"""The one place where the trainer's process groups come from, and where they end.

`init` reads the torchrun environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), joins the
trainers with NCCL on GPUs or gloo on CPUs, and builds megatron-core's parallel state from the recipe's
topology. Everything else asks megatron-core's `parallel_state`, or takes the frozen `Rank`.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.recipe.topology_rules import group_problems


@dataclass(frozen=True)
class Rank:
    """Coordinates of one trainer process.

    Two views of the same world: world = tp * cp * dp * pp for the dense layers and
    world = etp * ep * edp * pp for the experts. `dp` does not contain `cp`. The two layer counts fix the outer
    pipeline stages; None splits evenly.
    """

    rank: int = 0
    world: int = 1
    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    vpp_size: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    cp: int = 0
    cp_size: int = 1
    dp: int = 0
    dp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1
    edp: int = 0
    edp_size: int = 1
    device: str = "cpu"

    @property
    def is_first(self) -> bool:
        """True on the one process that writes files and talks to the coordinator."""
        return self.rank == 0


def check(topology: Topology) -> None:
    """Refuse sizes that cannot form groups.

    Raises:
        ValueError: naming the sizes that do not divide, before any process group is made.
    """
    if problems := list(group_problems(topology)):
        raise ValueError("; ".join(problems))


def init(topology: Topology, seed: int, timeout: float = 300.0) -> Rank:
    """Join the trainer's world and build its parallel groups.

    Args:
        topology: sizes from the recipe; `topology.world` must equal WORLD_SIZE.
        seed: seed of weights and of megatron-core's random-state tracker.
        timeout: seconds any collective may take before the process ends with an error.

    Raises:
        ValueError: the sizes do not divide, or do not fit the environment.
        KeyError: a torchrun variable is missing while more than one process is asked for.
    """
    check(topology)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != topology.world:
        raise ValueError(f"WORLD_SIZE={world} but topology.world={topology.world}; start {topology.world} processes")
    rank = int(os.environ["RANK"]) if world > 1 else 0
    on_gpu = torch.cuda.is_available()
    device = "cpu"
    if on_gpu:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    else:
        torch.set_num_threads(topology.threads)
    if world > 1:
        method, store = "env://", None
    else:
        method, store = None, dist.HashStore()  # one process needs no port
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=method, store=store, rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    return make_groups(topology, seed, device, distributed_timeout_minutes=max(1, round(timeout / 60)))


def own_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def make_groups(topology: Topology, seed: int, device: str = "cpu", **settings: Any) -> Rank:
    """megatron-core's parallel state over the world that is there, real or simulated; `settings` are its own."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp,
        **settings,
    )
    seed_everything(seed)
    return current(device, topology.vpp, topology.first_stage_layers, topology.last_stage_layers)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch and megatron-core's tracker (which adds its own offset per model-parallel rank)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def current(
    device: str = "cpu",
    vpp_size: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> Rank:
    """The coordinates of this process in megatron-core's present parallel state, which knows nothing of layers."""
    ps = parallel_state
    return Rank(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tp=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_rank(),
        pp_size=ps.get_pipeline_model_parallel_world_size(),
        vpp_size=vpp_size,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        cp=ps.get_context_parallel_rank(),
        cp_size=ps.get_context_parallel_world_size(),
        dp=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        ep=ps.get_expert_model_parallel_rank(),
        ep_size=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_rank(),
        etp_size=ps.get_expert_tensor_parallel_world_size(),
        edp=ps.get_expert_data_parallel_rank(),
        edp_size=ps.get_expert_data_parallel_world_size(),
        device=device,
    )


def shutdown() -> None:
    """Meet the other ranks, then destroy every process group.

    Without the barrier a rank may leave while another still uses a shared connection, and abort at exit.
    Call it on a clean end only: after an error on one rank the others would wait for it.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
