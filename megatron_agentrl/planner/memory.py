"""How many parameters a model has and how many bytes each process of a run needs, from its config alone.

An estimate to refuse what cannot fit before anything starts; not a profiler. Counts are exact for the architectures
below; activations and the processes' own footprint are upper-side guesses from measured runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_agentrl.layout import decoder
from megatron_agentrl.layout.megatron import hf_tensors
from megatron_agentrl.recipe.schema import Dtype, GradientDtype, Recipe, Recompute, RecomputeMethod, Topology
from megatron_agentrl.recipe.validate import read_config

GIB = 1024**3

#: Resident memory of a process before it holds a model, measured on a CPU: libraries, buffers, one event loop.
TRAINER_BASE = 0.7 * GIB
ENGINE_BASE = 1.8 * GIB
HELPER_BASE = 0.2 * GIB


@dataclass(frozen=True)
class Parameters:
    """Parameter counts. `experts` are the routed ones (sharded by ep); `embedding` counts embedding and head."""

    dense: int
    experts: int
    embedding: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.embedding


@dataclass(frozen=True)
class Memory:
    """Bytes of host memory that a run needs, by process."""

    trainer: float
    trainers: int
    engine: float
    engines: int
    helpers: float

    @property
    def total(self) -> float:
        return self.trainer * self.trainers + self.engine * self.engines + self.helpers

    def __str__(self) -> str:
        return (
            f"{self.trainers} trainer x {self.trainer / GIB:.1f} + {self.engines} engine x {self.engine / GIB:.1f} "
            f"+ helpers {self.helpers / GIB:.1f} = {self.total / GIB:.1f} GiB"
        )


def count_parameters(config: dict[str, Any]) -> Parameters:
    """Exact count for the config of a Hugging Face model with a layout (router bias buffers included, prediction heads
    not)."""
    counters = {
        "deepseek_v3": _by_layout,
        "nemotron_h": _nemotron_h,
        "qwen3_moe": _decoder,
        "qwen3": _decoder,
        "llama": _decoder,
    }
    kind = config.get("model_type")
    if kind not in counters:
        raise ValueError(f"model_type {kind!r}, expected one of {', '.join(counters)}")
    dense, experts = counters[kind](config)
    tables = 1 if config.get("tie_word_embeddings") else 2
    return Parameters(dense, experts, tables * config["vocab_size"] * config["hidden_size"])


def pattern(config: dict[str, Any]) -> str:
    """Layer letters of a nemotron_h config: M Mamba-2, * attention, E experts, - dense MLP."""
    if config.get("hybrid_override_pattern"):
        return config["hybrid_override_pattern"]
    letters = {
        "mamba": "M",
        "linear_attention": "M",
        "attention": "*",
        "full_attention": "*",
        "moe": "E",
        "mlp": "-",
    }
    return "".join(letters[name] for name in config["layers_block_type"])


def _nemotron_h(config: dict[str, Any]) -> tuple[int, int]:
    hidden = config["hidden_size"]
    dense = experts = 0
    for letter in pattern(config):
        dense += hidden  # the layer's norm
        if letter == "M":
            dense += _mamba(config)
        elif letter == "*":
            dense += _attention(config)
        elif letter == "-":
            dense += 2 * hidden * config["intermediate_size"]
        else:
            width = config.get("moe_latent_size") or hidden
            experts += config["n_routed_experts"] * 2 * width * config["moe_intermediate_size"]
            dense += config["n_routed_experts"] * (hidden + 1)  # router and its bias
            shared = config.get("n_shared_experts", 1) * config["moe_shared_expert_intermediate_size"]
            dense += 2 * hidden * shared
            dense += 2 * hidden * width if config.get("moe_latent_size") else 0
    return dense + hidden, experts


def _mamba(config: dict[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    convolved = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    in_proj = hidden * (inner + convolved + heads)
    convolution = convolved * (config.get("conv_kernel", 4) + int(config.get("use_conv_bias", True)))
    return in_proj + convolution + 3 * heads + inner + inner * hidden


def _attention(config: dict[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    return hidden * size * (2 * heads + 2 * (config.get("num_key_value_heads") or heads))


def _decoder(config: dict[str, Any]) -> tuple[int, int]:
    """Llama, Qwen3 and Qwen3-MoE: attention (normed queries and keys but for Llama), then an MLP or experts."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    sparse = decoder.pattern(config).count("E")
    norms = 2 * hidden + (2 * decoder.head_dim(config) if config["model_type"] in decoder.NORMED else 0)
    dense = layers * (_attention(config) + norms) + hidden
    dense += (layers - sparse) * 3 * hidden * config.get("intermediate_size", 0)
    if not sparse:
        return dense, 0
    count = decoder.experts(config)
    return dense + sparse * count * hidden, sparse * count * 3 * hidden * config["moe_intermediate_size"]


def _by_layout(config: dict[str, Any]) -> tuple[int, int]:
    return _split(hf_tensors(config).items(), {"model.embed_tokens.weight", "lm_head.weight"})


def count_heads(config: dict[str, Any]) -> Parameters:
    """Parameters of the multi-token-prediction heads, which only a trainer that trains them holds."""
    trunk = hf_tensors(config).keys()
    return Parameters(*_split(hf_tensors(config, heads=True).items(), trunk), embedding=0)


def _split(tensors: Iterable[tuple[str, tuple[int, ...]]], without: Collection[str]) -> tuple[int, int]:
    """(dense, routed experts) elements of the tensors whose names are not in `without`."""
    dense = experts = 0
    for name, shape in tensors:
        if name in without:
            continue
        if ".experts." in name:
            experts += prod(shape)
        else:
            dense += prod(shape)
    return dense, experts


def estimate(recipe: Recipe, config: dict[str, Any], *, gpu: bool, mode: str = "train") -> Memory:
    """Host memory of a run. With `gpu` the weights live elsewhere and only the processes' own footprint counts."""
    trainers = 0 if mode == "eval" else recipe.topology.world
    engines = recipe.rollout.replicas if mode in ("train", "eval") else 0
    helpers = HELPER_BASE * (2 + recipe.agent.workers) if engines else 0.0
    if gpu:
        return Memory(TRAINER_BASE, trainers, ENGINE_BASE, engines, helpers)
    trainer = trainer_bytes(recipe, config) + (_teacher_bytes(recipe) if mode == "train" else 0.0)
    return Memory(trainer, trainers, engine_bytes(recipe, config), engines, helpers)


def trainer_bytes(recipe: Recipe, config: dict[str, Any]) -> float:
    """Bytes of one trainer rank: weights, fp32 gradients, optimizer state and master, activations, footprint.

    Optimizer state is counted as not sharded over data-parallel ranks.
    """
    topology = recipe.topology
    etp = topology.etp if topology.etp is not None else topology.tp
    held = _held(count_parameters(config), topology)
    if recipe.model.mtp.train:  # all heads are on the last stage
        heads = count_heads(config)
        held += heads.dense / topology.tp + heads.experts / (topology.ep * etp)
    each = device_bytes_per_parameter(recipe) + host_bytes_per_parameter(recipe)
    return held * each + activation_bytes(recipe, config) + TRAINER_BASE


def _held(parameters: Parameters, topology: Topology) -> float:
    """Parameters of a rank, without prediction heads, as if every stage had as many."""
    etp = topology.etp if topology.etp is not None else topology.tp
    dense = (parameters.dense + parameters.embedding) / topology.tp / topology.pp
    return dense + parameters.experts / (topology.ep * etp * topology.pp)


def _teacher_bytes(recipe: Recipe) -> float:
    """Host memory of a rank's shards of the teacher, 0 without one."""
    algorithm = recipe.algorithm
    if not algorithm.teacher_coef or algorithm.teacher_path is None:
        return 0.0
    teacher = count_parameters(read_config(algorithm.teacher_path))
    return _held(teacher, recipe.topology) * _weight_bytes(recipe)


def device_bytes_per_parameter(recipe: Recipe) -> float:
    """Bytes a parameter takes beside the activations on the trainer's own device, the optimizer's part included.

    FP8 weights count as two bytes, one for each orientation; the offloaded share of masters and moments is
    `host_bytes_per_parameter`'s.
    """
    precision = recipe.precision
    weight = _weight_bytes(recipe)
    if precision.fp8 is not None and precision.fp8_param_gather:
        weight = 2.0  # the two orientations that the forward and the backward products read
    gradient = 2.0 if precision.gradients is GradientDtype.bf16 else 4.0
    return weight + gradient + _optimizer_bytes(recipe) * (1 - recipe.memory.optimizer_offload)


def host_bytes_per_parameter(recipe: Recipe) -> float:
    """Bytes a parameter takes in the host's memory: the reference policy and the offloaded share of the optimizer."""
    reference = _weight_bytes(recipe) if recipe.algorithm.kl_coef > 0 else 0.0
    return reference + _optimizer_bytes(recipe) * recipe.memory.optimizer_offload


def _weight_bytes(recipe: Recipe) -> float:
    return 4.0 if recipe.model.dtype is Dtype.fp32 else 2.0


def _optimizer_bytes(recipe: Recipe) -> float:
    """Masters (none where the weights are fp32 themselves) and Adam's two moments."""
    precision = recipe.precision
    sizes = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
    master = 0.0 if recipe.model.dtype is Dtype.fp32 else sizes[precision.masters.value]
    if recipe.optimizer.name != "adam":
        return master
    return master + sizes[precision.exp_avg.value] + sizes[precision.exp_avg_sq.value]


def engine_bytes(recipe: Recipe, config: dict[str, Any]) -> float:
    """Bytes of one engine replica: weights, a staged second copy, cache, footprint."""
    size = 4 if recipe.rollout.dtype is Dtype.fp32 else 2
    return 2 * size * count_parameters(config).total + recipe.rollout.kv_cache_gib * GIB + ENGINE_BASE


#: Hidden vectors that a layer keeps for its backward pass, of which its input is one.
VECTORS_PER_LAYER = 17


def activation_bytes(recipe: Recipe, config: dict[str, Any]) -> float:
    """Bytes one micro-batch keeps for the backward pass: hidden vectors of each layer, and logits three times.

    A context-parallel rank holds 1 / cp of the positions, logits included. With full recompute a unit keeps its input
    alone, and one unit at a time is whole again; what selective recompute saves depends on the modules and is not
    counted, nor is what tensor-parallel ranks share.
    """
    layers = (config.get("num_hidden_layers") or len(pattern(config))) / recipe.topology.pp
    vectors = VECTORS_PER_LAYER * layers
    memory = recipe.memory
    if memory.recompute is Recompute.full:
        count = min(memory.recompute_layers, layers)
        if memory.recompute_method is RecomputeMethod.uniform:
            vectors = layers / count + VECTORS_PER_LAYER * count
        else:
            vectors = count + VECTORS_PER_LAYER * max(layers - count, 1)
    per_token = vectors * config["hidden_size"] + 3 * config["vocab_size"]
    return recipe.train.micro_batch_tokens / recipe.topology.cp * per_token * _weight_bytes(recipe)


def available_bytes() -> tuple[float, str]:
    """Memory that new processes may still take, and what limits it: the machine or a control group."""
    limits = [(_mem_available(), "MemAvailable of this machine")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = root / group.lstrip("/")
        for place in (folder, *folder.parents):  # the tightest of the group and those above it
            if not place.is_relative_to(root):
                break
            text = (place / limit).read_text().strip() if (place / limit).is_file() else "max"
            if text != "max":
                reclaimable = _stat(place / "memory.stat", cache)
                free = float(text) - float((place / used).read_text()) + reclaimable
                limits.append((free, f"the control group {place}"))
    return min(limits)


def _stat(path: Path, key: str) -> float:
    fields = (line.split() for line in path.read_text().splitlines()) if path.is_file() else ()
    return next((float(field[1]) for field in fields if field[0] == key), 0.0)


def _mem_available() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line; expected Linux 3.14 or later")
