"""Builds any rank of a vLLM engine in this one process, runs vLLM's own weight loaders on tensors whose every element
says where it comes from, and compares what arrived with `layout.engine`.

Run as a program, because it replaces parts of vLLM for good: reads cases as JSON lines on stdin, writes what differs
as JSON lines on stdout. vLLM's own code orders the ranks, builds the model and loads it; replaced are the process
groups (a rank's place in each, without peers) and the choice of an expert kernel (a CPU has none for expert parallelism;
the choice does not touch the parameters of plain experts).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_PLUGINS"] = ""  # our repairs are not what is traced

import torch
import torch.distributed as dist
from layout_configs import numbered
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe_method
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models import utils as model_utils
from vllm.model_executor.parameter import RowvLLMParameter
from vllm.utils.torch_utils import set_default_torch_dtype

from megatron_agentrl.layout.boxes import DtypeRule, ElementRule, ParameterLayout, check_tiling, matrix_shape
from megatron_agentrl.layout.engine import EngineTopology, engine_layouts, engine_table

GROUPS = ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB", "_WORLD")


@dataclass
class Place:
    """What model construction and loading ask of a vLLM process group: who is in it and where this rank stands."""

    ranks: list[int]
    rank: int

    def __post_init__(self) -> None:
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(self.rank)
        self.is_first_rank, self.is_last_rank = self.rank == self.ranks[0], self.rank == self.ranks[-1]
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: self.world_size)
        self.local_rank, self.device_communicator = 0, None


def install() -> None:
    def place(group_ranks: list[list[int]], local_rank: int, backend: str, *args: Any, **kwargs: Any) -> Place:
        rank = dist.get_rank()
        return Place(next(ranks for ranks in group_ranks if rank in ranks), rank)

    def any_kernel(moe_config: Any) -> tuple[Any, None]:
        return moe_method.UnquantizedMoeBackend.CPU, None

    stock = moe_config.FusedMoEConfig.__post_init__

    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:  # its last statement refuses ungated experts on a CPU
            stock(self, *args, **kwargs)
        except NotImplementedError as error:
            if "is_act_and_mul=False" not in str(error):
                raise

    parallel_state.init_model_parallel_group = place
    moe_method.select_unquantized_moe_backend = any_kernel
    moe_config.FusedMoEConfig.__post_init__ = post_init


@contextmanager
def simulated(config: VllmConfig, topology: EngineTopology, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world)
    parallel_state._WORLD = Place(list(range(topology.world)), rank)
    try:
        with set_current_vllm_config(config):
            parallel_state.initialize_model_parallel(topology.tp, topology.pp, backend="fake")
            yield
    finally:
        for name in GROUPS:
            setattr(parallel_state, name, None)
        model_utils._model_to_pp_missing_layer_names.clear()  # by id(), which the next model may get again
        dist.destroy_process_group()


@contextmanager
def built(hf: dict[str, Any], topology: EngineTopology, rank: int, dtype: torch.dtype) -> Iterator[torch.nn.Module]:
    """vLLM's model of the rank, every parameter NaN."""
    with tempfile.TemporaryDirectory() as folder:  # read again by VllmConfig where the head is tied
        (Path(folder) / "config.json").write_text(json.dumps(hf | {"architectures": [engine_table(hf).model]}))
        config = vllm_config(folder, topology, dtype)
        with simulated(config, topology, rank), set_default_torch_dtype(dtype):
            made = get_model_architecture(config.model_config)[0](vllm_config=config)
            for parameter in made.parameters():
                parameter.data.fill_(float("nan"))
            yield made


def vllm_config(folder: str, topology: EngineTopology, dtype: torch.dtype) -> VllmConfig:
    os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
    if topology.layers is not None:
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, topology.layers))
    model = ModelConfig(folder, tokenizer=folder, skip_tokenizer_init=True, dtype=dtype, seed=0, enforce_eager=True)
    parallel = ParallelConfig(
        tensor_parallel_size=topology.tp,
        pipeline_parallel_size=topology.pp,
        enable_expert_parallel=topology.expert_parallel,
        distributed_executor_backend="mp",
    )
    parallel.data_parallel_size = topology.dp
    return VllmConfig(model_config=model, parallel_config=parallel, cache_config=CacheConfig())


def placeholders(hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, each element another whole number that float32 holds exactly; A_log is spread
    over a range in which -exp() tells its elements apart."""
    found = {name: tensor.float() for name, tensor in numbered(hf).items()}
    assert max(float(tensor.max()) for tensor in found.values()) < 2**24
    logs = [name for name in found if name.endswith("A_log")]
    for index, name in enumerate(logs):
        count = found[name].numel()
        found[name] = torch.arange(1 + index * count, 1 + (index + 1) * count).float().log()
    return found


def expected(layout: ParameterLayout, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The parameter that `layout` describes; NaN where it says nothing."""
    out = torch.full(layout.matrix, float("nan"))
    for box in layout.boxes:
        source = tensors[box.tensor].reshape(matrix_shape(tensors[box.tensor].shape))[box.r0 : box.r1, box.c0 : box.c1]
        if layout.element_rule is ElementRule.neg_exp:
            source = -torch.exp(source)
        out[box.row : box.row + box.rows, box.col : box.col + box.cols] = source
    for pad in layout.padding:
        out[pad.row : pad.row + pad.rows, pad.col : pad.col + pad.cols] = 0
    return out.view(layout.shape)


def differences(hf: dict[str, Any], topology: EngineTopology, rank: int) -> list[str]:
    """What vLLM's rank holds after loading, against its layouts: names, shapes and every element."""
    tensors = placeholders(hf)
    layouts = {layout.name: layout for layout in engine_layouts(hf, topology, rank)}
    with built(hf, topology, rank, torch.float32) as model:
        model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
        held = {name: parameter.data for name, parameter in model.named_parameters()}
    found = [f"parameter {name} {tuple(held[name].shape)} has no layout" for name in held.keys() - layouts.keys()]
    found += [f"layout {name} {layouts[name].shape} has no parameter" for name in layouts.keys() - held.keys()]
    for name in held.keys() & layouts.keys():
        check_tiling(layouts[name])
        want, have = expected(layouts[name], tensors), held[name]
        if want.shape != have.shape:
            found.append(f"{name}: vLLM has shape {tuple(have.shape)}, the layout {tuple(want.shape)}")
        elif not torch.equal(want, have):
            at = (want != have).nonzero()[0].tolist()
            found.append(
                f"{name}: {int((want != have).sum())} elements differ, first at {at}: vLLM has "
                f"{have[tuple(at)].item()}, the layout {want[tuple(at)].item()}"
            )
    return found


def types(hf: dict[str, Any], topology: EngineTopology, rank: int) -> list[str]:
    """Parameters whose type in a bfloat16 engine is not what the layouts say."""
    rules = {layout.name: layout.dtype_rule for layout in engine_layouts(hf, topology, rank)}
    with built(hf, topology, rank, torch.bfloat16) as model:
        held = {name: parameter.dtype for name, parameter in model.named_parameters()}
    kinds = {DtypeRule.fp32: torch.float32, DtypeRule.compute: torch.bfloat16}
    return [f"{name}: {held[name]}, not {rule.value}" for name, rule in rules.items() if held[name] != kinds[rule]]


def move_a_shard() -> None:
    """As if vLLM had changed: row-parallel weights come from the next rank's columns."""
    stock = RowvLLMParameter.load_row_parallel_weight

    def moved(self: Any, loaded_weight: torch.Tensor) -> None:
        self.tp_rank = (self.tp_rank + 1) % self.tp_size
        stock(self, loaded_weight)

    RowvLLMParameter.load_row_parallel_weight = moved


def main() -> None:
    install()
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = json.loads(line)
        if case["what"] == "moved":
            move_a_shard()
        judge = types if case["what"] == "types" else differences
        sizes = case["topology"]
        topology = EngineTopology(**sizes | {"layers": tuple(sizes["layers"]) if sizes.get("layers") else None})
        try:
            found = [problem for rank in case["ranks"] for problem in judge(case["config"], topology, rank)]
        except Exception as error:  # reported as the case's outcome; the other cases go on
            found = [f"{type(error).__name__}: {error}"]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
