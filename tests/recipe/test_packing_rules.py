import pytest

from megatron_agentrl.recipe.packing_rules import context_parallel_problems
from megatron_agentrl.recipe.schema import Topology


def lines(config: dict, **sizes: int) -> list[str]:
    return list(context_parallel_problems(Topology(world=64, **sizes), config))


@pytest.mark.parametrize(
    ("heads", "groups", "sizes", "expected"),
    [
        (6, 2, {"cp": 4}, "holds 6 Mamba heads in 2 groups (tp=1); cp must divide the heads and divide or be a multiple of the groups, so it can be 1, 2, 6; set topology.cp=2"),
        (6, 2, {"cp": 2, "tp": 2}, "holds 3 Mamba heads in 1 groups (tp=2); cp must divide the heads and divide or be a multiple of the groups, so it can be 1, 3; set topology.cp=1"),
        (128, 8, {"cp": 24, "tp": 2}, "so it can be 1, 2, 4, 8, 16, 32, 64; set topology.cp=16"),
    ],
)  # fmt: skip
def test_context_parallel_ranks_share_mamba_heads(heads, groups, sizes, expected):
    (line,) = lines({"mamba_num_heads": heads, "n_groups": groups}, **sizes)
    assert line.startswith(f"topology.cp={sizes['cp']}: ") and line.endswith(expected)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"mamba_num_heads": 6, "n_groups": 2}, {"cp": 2}),
        ({"mamba_num_heads": 128, "n_groups": 8}, {"cp": 8, "tp": 8}),
        ({"num_attention_heads": 6}, {"cp": 5}),
        ({}, {"cp": 3}),
    ],
)
def test_what_fits_is_not_refused(config, sizes):
    assert lines(config, **sizes) == []
