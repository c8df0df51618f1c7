"""One process of the four in `test_weights_io`: load, gather, save. Imports no megatron-core, to start fast."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from layout_configs import numbered
from weights_shell import shells

from megatron_agentrl.layout.megatron import Grid, hf_tensors, split_layers
from megatron_agentrl.trainer.weights_io import iterate_hf, load_hf, save_hf


def gather(index: int, world: int, sizes: dict[str, int], folder: Path) -> None:
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=index, world_size=world, timeout=timedelta(seconds=60))
    config = json.loads((folder / "hf" / "config.json").read_text())
    at = Grid(world, split_layers(8, sizes.get("pp", 1)), **sizes).coordinates(index)
    rank = SimpleNamespace(
        rank=index, world=world, tp=at.tp_rank, tp_size=at.tp, pp=at.pp_rank, pp_size=at.pp, vpp_size=1,
        first_stage_layers=None, last_stage_layers=None,
        cp_size=1, ep=at.ep_rank, ep_size=at.ep, etp=at.etp_rank, etp_size=at.etp,
    )  # fmt: skip
    model = shells(config, at)
    load_hf(model, config, folder / "hf", rank)
    expected = numbered(config)
    names = []
    for name, tensor in iterate_hf(model, config, rank, torch.float32):
        names.append(name)
        assert (tensor is None) == (index > 0)
        if tensor is not None:
            assert tensor.double().equal(expected[name]), name
    assert names == list(hf_tensors(config))
    wrote = save_hf(folder / "out", folder / "hf", iterate_hf(model, config, rank, torch.float32))
    assert wrote == (index == 0)
    dist.barrier()
    dist.destroy_process_group()
