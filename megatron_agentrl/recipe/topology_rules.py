"""Which topologies a model can be cut into: one line for each problem, with the numbers and the nearest legal choice.

The rules are megatron-core 0.19.2's own refusals (a test builds it at random sizes and compares), said before a
process starts, and without torch. Two go beyond: a pipeline that does not divide the layers evenly must be asked for
by its outer stages, and a setting without effect is refused rather than ignored. What a machine has is not judged
here, except for packages that a setting needs.

A vocabulary needs no rule: it is padded to a multiple of 64·tp, and the padding is left out of every softmax.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from math import gcd
from typing import Any

from megatron_agentrl.recipe.mla_rules import latent_topology_problems
from megatron_agentrl.recipe.model_kinds import expert_count, letters, shared_width
from megatron_agentrl.recipe.packing_rules import context_parallel_problems
from megatron_agentrl.recipe.precision_rules import transformer_engine_missing
from megatron_agentrl.recipe.schema import Dispatcher, Recipe, Topology

#: Letters of a hybrid pattern.
LETTERS = {"M": "Mamba-2", "*": "attention", "E": "mixture of experts", "-": "MLP"}

#: Largest size that a message lists.
LARGEST = 64


def topology_problems(topology: Topology, config: dict[str, Any] | None = None) -> Iterator[str]:
    """What keeps `topology` from forming groups and, with the model's config.json, from cutting the model."""
    config = config or {}
    yield from group_problems(topology)
    yield from _pipeline_problems(topology, config)
    if config:
        yield from _tensor_problems(topology, config)
        yield from _expert_problems(topology, config)
    yield from _communication_problems(topology)
    yield from context_parallel_problems(topology, config)
    yield from latent_topology_problems(topology, config)


def data_parallel_problems(recipe: Recipe) -> Iterator[str]:
    """Overlap settings that the optimizer does not allow, or that would have no effect."""
    topology, name = recipe.topology, recipe.optimizer.name
    if topology.overlap_param_gather:
        needed = {
            "optimizer.name=adam": name != "sgd",
            "topology.distributed_optimizer=true": topology.distributed_optimizer,
            "topology.overlap_grad_reduce=true": topology.overlap_grad_reduce,
        }
        if missing := [key for key, there in needed.items() if not there]:
            yield (
                f"topology.overlap_param_gather=true: needs {' and '.join(missing)}; set them or "
                "topology.overlap_param_gather=false"
            )
    if topology.bucket_size is not None and not topology.overlap_grad_reduce:
        yield (
            f"topology.bucket_size={topology.bucket_size}: has no effect without topology.overlap_grad_reduce=true "
            "(gradients then travel in one piece); leave it out"
        )
    if not topology.distributed_optimizer and name == "sgd":
        yield "topology.distributed_optimizer=false: has no effect with optimizer.name=sgd (no state); leave it out"


# ---- groups ----------------------------------------------------------------------------------------------------


def group_problems(topology: Topology) -> Iterator[str]:
    """Sizes that cannot form process groups, whatever the model."""
    world, tp, pp, cp, ep = topology.world, topology.tp, topology.pp, topology.cp, topology.ep
    etp = topology.etp if topology.etp is not None else tp
    if world % (tp * pp * cp):
        yield (
            f"topology: tp·pp·cp = {tp}·{pp}·{cp} = {tp * pp * cp} does not divide world = {world}; "
            f"set topology.world={_multiple(tp * pp * cp, world)}"
        )
    if world % (etp * ep * pp):
        followed = f" (etp was not given and follows tp = {tp})" if topology.etp is None and tp > 1 else ""
        fits = topology.etp is None and tp > 1 and world % (ep * pp) == 0
        way_out = "topology.etp=1 would fit" if fits else f"set topology.world={_multiple(etp * ep * pp, world)}"
        yield (
            f"topology: etp·ep·pp = {etp}·{ep}·{pp} = {etp * ep * pp} does not divide world = {world}{followed}; "
            f"{way_out}"
        )
    if topology.vpp > 1 and pp == 1:
        yield f"topology.vpp={topology.vpp}: needs pp > 1, found pp=1; set topology.vpp=1"
    if topology.sequence_parallel and tp == 1:
        yield "topology.sequence_parallel=true: needs tp > 1, found tp=1; set topology.sequence_parallel=false"


def _multiple(of: int, near: int) -> int:
    """The multiple of `of` next to `near`, at least one time."""
    return of * max(1, round(near / of))


# ---- layers ----------------------------------------------------------------------------------------------------


def _pipeline_problems(topology: Topology, config: dict[str, Any]) -> Iterator[str]:
    stages, first, last = topology.pp * topology.vpp, topology.first_stage_layers, topology.last_stage_layers
    if stages == 1:
        for name, value in (("first", first), ("last", last)):
            if value is not None:
                yield f"topology.{name}_stage_layers={value}: has no effect with one stage; leave it out"
    if not config:
        return
    pattern = letters(config)
    if unknown := sorted(set(pattern) - set(LETTERS)):
        known = ", ".join(f"{letter} {what}" for letter, what in LETTERS.items())
        yield f"config.json: the layer pattern holds {', '.join(unknown)}; known are {known}: correct the pattern"
    layers = len(pattern)
    if stages == 1 or not layers:
        return
    if stages > layers:
        yield (
            f"topology: pp·vpp = {stages} stages, but the model has {layers} layers; set topology.pp and topology.vpp "
            f"so that pp·vpp is at most {layers}"
        )
        return
    given = [size for size in (first, last) if size is not None]
    free, rest = stages - len(given), layers - sum(given)
    if rest < free or (rest % free if free else rest):
        asked = "".join(f", {name}_stage_layers = {n}" for name, n in (("first", first), ("last", last)) if n)
        yield (
            f"topology: pp·vpp = {stages} does not divide the model's {layers} layers{asked}; {_even(layers, stages)}"
            f"{_outer_stages(layers, stages)}"
        )


def _even(layers: int, stages: int) -> str:
    if layers % stages == 0:
        return "leave both out for an even split, or "
    fitting = [size for size in range(1, layers + 1) if layers % size == 0]
    nearest = min(fitting, key=lambda size: (abs(size - stages), size))
    return f"set pp·vpp = {nearest}, or "


def _outer_stages(layers: int, stages: int) -> str:
    """The outer stages of the most even split that leaves equal ones between."""
    between = stages - 2
    splits = []
    for inner in range(1, layers + 1) if between else (0,):
        outer = layers - inner * between
        if outer >= 2:
            splits.append((max(inner, outer - outer // 2), abs(outer - 2 * inner), outer // 2, outer - outer // 2))
    *_, first, last = min(splits)
    return f"set topology.first_stage_layers={first} topology.last_stage_layers={last}"


# ---- sizes inside a layer --------------------------------------------------------------------------------------


def _tensor_problems(topology: Topology, config: dict[str, Any]) -> Iterator[str]:
    tp = topology.tp
    found = list(_tensor_faults(tp, config))
    if not found:
        return
    fitting = [str(size) for size in range(1, LARGEST + 1) if not any(True for _ in _tensor_faults(size, config))]
    for fault in found:
        yield f"topology.tp={tp}: {fault}; sizes that fit: {', '.join(fitting)}"


def _tensor_faults(tp: int, config: dict[str, Any]) -> Iterator[str]:
    pattern = letters(config)
    heads = config.get("num_attention_heads")
    counts = [("attention heads", heads)]
    if "M" in pattern or not pattern:
        counts.append(("Mamba heads", config.get("mamba_num_heads")))
        counts.append(("Mamba groups", config.get("n_groups") or config.get("mamba_n_groups")))
    if "-" in pattern:
        counts.append(("MLP columns (intermediate_size)", config.get("intermediate_size")))
    if "E" in pattern:
        counts.append(("shared-expert columns", shared_width(config)))
    for what, count in counts:
        if count and count % tp:
            yield f"the model has {count} {what}, which tp does not divide"
    groups = config.get("num_key_value_heads") or heads
    if not heads or not groups or "kv_lora_rank" in config:  # latent attention has no key/value heads to cut
        return
    if groups % tp and tp % groups:
        yield f"the model has {groups} key/value heads; expected a divisor or a multiple of {groups}"
    elif "*" in pattern and groups < tp and heads % tp == 0:
        # megatron-core then cuts the interleaved rows of query, key and value as they lie.
        dim = config.get("head_dim") or config.get("attention_head_dim") or config.get("hidden_size", 0) // heads
        if (rows := (heads + 2 * groups) * dim) % tp:
            yield f"the model has {rows} query, key and value rows, which tp does not divide"


# ---- experts ---------------------------------------------------------------------------------------------------


def _expert_problems(topology: Topology, config: dict[str, Any]) -> Iterator[str]:
    tp, ep = topology.tp, topology.ep
    etp = topology.etp if topology.etp is not None else tp
    experts = expert_count(config) if "E" in letters(config) else 0
    if not experts:
        if ep > 1:
            yield f"topology.ep={ep}: the model has no experts; set topology.ep=1"
        if topology.dispatcher is not Dispatcher.alltoall:
            yield (
                f"topology.dispatcher={topology.dispatcher.value}: has no effect, the model has no experts; leave it out"
            )
        return
    if experts % ep:
        yield f"topology.ep={ep}: the model has {experts} experts, which ep does not divide; {divisors(experts)}"
    width = config.get("moe_intermediate_size")
    if width and width % etp:
        yield (
            f"topology.etp={etp}: the model's experts have {width} columns (moe_intermediate_size), which etp does not "
            f"divide; {divisors(width)}"
        )
    if tp > 1 and not topology.sequence_parallel:
        yield (
            f"topology.tp={tp}: experts with tp > 1 need each token once in the tensor-parallel group; set "
            "topology.sequence_parallel=true"
        )
    yield from _dispatcher_problems(topology, etp)


def _dispatcher_problems(topology: Topology, etp: int) -> Iterator[str]:
    if topology.dispatcher is not Dispatcher.flex:
        return
    if etp * topology.ep == 1:
        yield "topology.dispatcher=flex: etp·ep = 1, there is nobody to send tokens to; set topology.dispatcher=alltoall"
    for package, module in (("DeepEP", "deep_ep"), ("Transformer Engine", "transformer_engine")):
        if importlib.util.find_spec(module) is None:
            branch = (
                " (its hybrid-ep branch)" if topology.flex_backend.value == "hybridep" and module == "deep_ep" else ""
            )
            yield (
                f"topology.dispatcher=flex: needs the package {package}{branch} on GPUs, found no module {module}; "
                "install it or set topology.dispatcher=alltoall"
            )


def _communication_problems(topology: Topology) -> Iterator[str]:
    if topology.dispatcher is not Dispatcher.flex and topology.flex_backend.value != "deepep":
        yield (
            f"topology.flex_backend={topology.flex_backend.value}: has no effect with "
            f"topology.dispatcher={topology.dispatcher.value}; set topology.dispatcher=flex"
        )
    if not topology.tp_comm_overlap:
        return
    if not topology.sequence_parallel:
        yield "topology.tp_comm_overlap=true: needs tp > 1 with sequence_parallel; set topology.sequence_parallel=true"
    if transformer_engine_missing():
        yield (
            "topology.tp_comm_overlap=true: needs the package Transformer Engine (transformer-engine[pytorch]), which "
            "is not installed; install it or set topology.tp_comm_overlap=false"
        )


def divisors(number: int) -> str:
    """The sizes that divide `number`, as the end of a message."""
    fitting = [str(size) for size in range(1, min(number, LARGEST) + 1) if gcd(size, number) == size]
    return f"sizes that fit: {', '.join(fitting)}"
