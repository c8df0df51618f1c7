"""`check` against megatron-core itself: a topology passes exactly where every stage of the model can be built."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import trainer_toy as toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_agentrl.layout.megatron import layer_pattern as layout_pattern
from megatron_agentrl.recipe.model_kinds import letters
from megatron_agentrl.recipe.schema import Dispatcher, Topology
from megatron_agentrl.recipe.topology_rules import topology_problems
from megatron_agentrl.trainer import model
from megatron_agentrl.trainer.inspect import simulated


@st.composite
def models(draw):
    """A toy of either architecture whose sizes divide one another where the architecture itself asks for it."""
    heads = draw(st.sampled_from([2, 4, 6, 8]))
    common = {
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([g for g in (1, 2, 3, 4) if heads % g == 0])),
        "head_dim": draw(st.sampled_from([5, 8])),
        "intermediate_size": draw(st.sampled_from([44, 45])),
        "moe_intermediate_size": draw(st.sampled_from([28, 30, 27])),
    }
    experts = draw(st.sampled_from([4, 6]))
    if draw(st.booleans()):
        layers = draw(st.integers(1, 3))
        dense = [layer for layer in range(layers) if draw(st.booleans())]
        return toy.QWEN | common | {"num_hidden_layers": layers, "num_experts": experts, "mlp_only_layers": dense}
    mamba = draw(st.sampled_from([4, 6]))
    return toy.NEMOTRON | common | {
        "hybrid_override_pattern": draw(st.text("M*E-", min_size=1, max_size=6)),
        "mamba_num_heads": mamba,
        "n_groups": draw(st.sampled_from([1, 2, mamba])),
        "n_routed_experts": experts,
        "moe_shared_expert_intermediate_size": draw(st.sampled_from([36, 33])),
    }  # fmt: skip


@st.composite
def topologies(draw):
    """Mostly worlds that the sizes divide, so that refusals of the model are met as often as those of the groups."""
    tp, pp, ep = (draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in range(3))
    etp = draw(st.sampled_from([None, 1, 2]))
    size = max(tp * pp, (etp or tp) * ep * pp)
    world = draw(st.sampled_from([size, size, 2 * size, draw(st.integers(1, 12))]))
    return Topology(
        world=world, tp=tp, pp=pp, ep=ep, etp=etp,
        vpp=draw(st.sampled_from([1, 1, 1, 2])),
        sequence_parallel=draw(st.booleans()) if tp == 1 else draw(st.sampled_from([True, True, False])),
        dispatcher=draw(st.sampled_from([Dispatcher.alltoall, Dispatcher.allgather])),
        first_stage_layers=draw(st.sampled_from([None, None, 1])),
        last_stage_layers=draw(st.sampled_from([None, None, 2])),
    )  # fmt: skip


#: Where `check` is stricter than megatron-core on purpose: without effect, or uneven without being asked for.
STRICTER = ("has no effect", "does not divide the model's")


def refusal(config: dict, sizes: Topology) -> str:
    """What megatron-core (or the code that configures it) says on the first rank of each pipeline stage, and the last."""
    for rank in {*range(0, sizes.world, max(1, sizes.world // sizes.pp)), sizes.world - 1}:
        try:
            with simulated(rank, sizes) as at:
                model.build(config, toy.recipe(sizes), at)
        except (AssertionError, ImportError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_check_passes_exactly_where_megatron_core_builds():
    seen: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(models(), topologies())
    def agree(config, sizes):
        problems, refused = list(topology_problems(sizes, config)), refusal(config, sizes)
        if problems and all(any(words in line for words in STRICTER) for line in problems):
            seen["stricter"] += 1
            return
        assert bool(problems) == bool(refused), (problems, refused, sizes, config)
        seen["refused" if refused else "built"] += 1

    agree()
    assert min(seen["refused"], seen["built"]) >= 10, seen


@given(models())
@settings(max_examples=50, deadline=None)
def test_the_rules_read_the_same_layers_as_the_layouts(config):
    assert letters(config) == layout_pattern(config)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Topology(world=2, ep=2, dispatcher=Dispatcher.flex), "DeepEP is not installed"),
        (Topology(world=2, tp=2), "needs topology.sequence_parallel=true"),
    ],
    ids=["flex dispatcher without DeepEP", "experts with tensor parallelism and whole sequences"],
)
def test_what_is_refused_for_a_package_or_a_mode_is_refused_by_the_model_too(sizes, words):
    assert words in refusal(toy.NEMOTRON, sizes)
    assert list(topology_problems(sizes, toy.NEMOTRON))


def test_megatron_core_itself_refuses_experts_with_tensor_parallelism_and_whole_sequences():
    """The reason for that rule: it is megatron-core's, met in the forward pass of training."""
    sizes = Topology(world=2, tp=2, sequence_parallel=True)
    with simulated(0, sizes) as rank:
        (chunk,) = model.build(toy.NEMOTRON, toy.recipe(sizes), rank)
        layer = next(module for module in chunk.modules() if isinstance(module, MoELayer))
        layer.config = replace(layer.config, sequence_parallel=False)
        with pytest.raises(ValueError, match="without also enabling sequence parallelism"):
            layer.train()(None)
