"""Checkpoints of any layout at any other: weights, biases, moments, step counts bit for bit, and the next losses.

The harness is `checkpoint_matrix`; here is what must hold of each pair of layouts.
"""

from __future__ import annotations

import checkpoint_matrix as matrix
import pytest
from safetensors.torch import load_file

from megatron_agentrl.trainer import checkpoint

HYBRID = matrix.HYBRID
#: (saved at, loaded at) of the fast tests: each layout once on either side.
FAST = [("one", "VPP3xPP2"), ("VPP3xPP2", "TP2+SP"), ("TP2+SP", "DP2"), ("DP2", "one")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def fast(rank, shared):
    return matrix.run(shared, rank, {HYBRID: FAST})


def judge(cell: dict, source: str, target: str) -> None:
    sizes = [[getattr(matrix.LAYOUTS[at], size) for size in ("world", "tp", "pp", "ep")] for at in (source, target)]
    assert cell["different"] == []
    assert cell["steps"] == [matrix.SAVED_AT + matrix.FURTHER]  # every parameter's own, after the further steps
    # Only the order of sums differs between layouts; on the layout that saved it not even that.
    assert cell["gap"] <= (0.0 if source == target else 1e-5)
    # Which ranks draw alike follows from the sizes: another layout's states would make tensor-parallel ranks draw alike.
    assert cell["random_state_restored"] is (sizes[0] == sizes[1])


@pytest.mark.parametrize("source, target", FAST)
def test_state_is_equal_bit_for_bit_and_the_next_losses_follow(fast, source, target):
    judge(fast[source, target, HYBRID], source, target)


def test_what_is_compared_is_every_tensor_with_both_moments_and_a_count(fast, shared):
    state = load_file(shared / f"DP2-{HYBRID}.safetensors")
    kinds = {kind: {key.split("/")[1] for key in state if key.startswith(f"{kind}/")} for kind in matrix.STATE}
    weights = {key.split("/")[1] for key in state if key.startswith("weights/")}
    biases = {name for name in weights if name.endswith("e_score_correction_bias")}
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == kinds["step"] == weights - biases
    assert len(weights) == 87 and len(biases) == 2
    assert all(state[f"weights/{name}"].unique().numel() > 1 for name in biases)  # uneven: they are state too
    assert all(state[f"step/{name}"].eq(matrix.SAVED_AT).all() for name in kinds["step"])  # and each shard once
    assert all(state[f"exp_avg_sq/{name}"].any() for name in kinds["step"])


def test_states_of_two_layouts_agree_before_any_checkpoint(fast, shared):
    """The gathering that judges is itself judged: layouts trained alike have gathered moments alike."""
    want, got = (load_file(shared / f"{layout}-{HYBRID}.safetensors") for layout in ("one", "VPP3xPP2"))
    for key, value in want.items():
        if key.startswith("exp_avg/"):
            assert float((got[key] - value).abs().max()) <= 1e-4 * float(value.abs().max()), key


def test_the_mark_names_the_layout_that_wrote_it(fast, shared):
    mark = checkpoint.check(shared / f"TP2+SP-{HYBRID}" / f"step_{matrix.SAVED_AT}")
    assert mark["layout"] == {"world": 2, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "etp": 2}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_layout_reads_every_other(rank, tmp_path):
    cells = {HYBRID: matrix.PAIRS, matrix.QWEN: matrix.ROUND, matrix.DEEPSEEK: matrix.ROUND}
    cells[HYBRID] = cells[HYBRID] + matrix.BESIDE
    found = matrix.run(tmp_path, rank, cells)
    assert len(found) == 36 + 6 + 6 + 6
    for (source, target, _), cell in found.items():
        judge(cell, source, target)
