"""Sequences cut over processes against one process, padded and packed. One start of processes serves every case."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import torch
import trainer_toy as toy
from sequence_cases import PLANS, measure

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import checkpoint
from megatron_agentrl.trainer.weights_io import iterate_hf

LAYOUTS = pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])


@pytest.fixture(scope="module")
def alone(rank, tmp_path_factory):
    """What one process computes with padded rows, and the weights that the workers start from."""
    shared, found = tmp_path_factory.mktemp("context-parallel"), {}
    for name in toy.MODELS:
        found[name] = measure(name, rank, Topology(), False)
        torch.save(found[name]["start"], shared / f"start-{name}.pt")
    return shared, found


def start(shared: Path, world: int, cases: list[str]) -> Path:
    processes.run("sequence_worker.py", world, shared, str(shared), *cases, meetings=len(cases))
    return shared


@pytest.fixture(scope="module")
def pair(alone):
    return start(alone[0], 2, ["cp2"])


@pytest.fixture(scope="module")
def expert_pair(alone):
    return start(alone[0], 2, ["cp2-ep2"])


@pytest.fixture(scope="module")
def four(alone, rank):
    alone[1]["wide"] = measure("wide", rank, Topology(), False)
    for name in ("nemotron", "wide"):
        chunks, _ = toy.build(name, rank, toy.SGD)  # the seed's weights, which `measure` started from
        checkpoint.save_weights(alone[0] / f"start-{name}", chunks)
    return start(alone[0], 4, ["cp2-dp2", "cp2-tp2-sp", "cp2-pp2"])


def read(shared: Path, case: str, name: str, packing: bool, world: int) -> list[dict]:
    return [torch.load(shared / f"{case}-{name}-{packing}-{rank}.pt") for rank in range(world)]


def same_numbers(want: dict, got: dict) -> None:
    for kind in ("sgd", "adam"):  # loss, gradient norm and tokens of each of four steps
        torch.testing.assert_close(torch.tensor(got[kind]), torch.tensor(want[kind]), rtol=1e-5, atol=0)
    assert got["rl"] == pytest.approx(want["rl"], rel=1e-5)


def same_tensors(want: dict, got: dict) -> None:
    for what in ("gradients", "end"):
        for key, value in got[what].items():
            expected = want[what][key]
            assert (value - expected).abs().max() <= 1e-5 * expected.abs().max(), (what, key)


def same_logprobs(want: dict, got: list[dict]) -> None:
    """Whole rows in order on every rank, whatever the cut and the grouping."""
    rows = {row: want["logprobs"][part][at] for part in PLANS[1][0] for at, row in enumerate(part)}
    seen = set()
    for part, logprobs_BT in (item for result in got for item in result["logprobs"].items()):
        assert logprobs_BT.shape[0] == len(part)
        for at, row in enumerate(part):
            length = toy.LENGTHS[row]
            torch.testing.assert_close(logprobs_BT[at, :length], rows[row][:length], rtol=1e-5, atol=1e-5)
            assert logprobs_BT[at, 0] == 0 and not logprobs_BT[at, length:].any()
            seen.add(row)
    assert seen == set(range(6))


@LAYOUTS
@pytest.mark.parametrize("name", toy.MODELS)
def test_two_context_parallel_ranks_equal_one_process(alone, pair, name, packing):
    results = read(pair, "cp2", name, packing, 2)
    for got in results:
        same_numbers(alone[1][name], got)
        same_tensors(alone[1][name], got)
        same_logprobs(alone[1][name], [got])


def test_weights_are_published_whole_from_context_parallel_ranks(alone, pair, rank):
    want = dict(iterate_hf(toy.build("nemotron", rank, toy.SGD)[0], toy.NEMOTRON, rank, torch.float32))
    sent = [torch.load(pair / f"sent-{index}.pt") for index in range(2)]
    assert sent[1] == {} and list(sent[0]) == list(want)
    assert all(torch.equal(sent[0][key], tensor) for key, tensor in want.items())


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("name", toy.MODELS)
def test_context_parallel_with_split_experts_equals_one_process(alone, expert_pair, name, packing):
    for got in read(expert_pair, "cp2-ep2", name, packing, 2):
        same_numbers(alone[1][name], got)
        same_tensors(alone[1][name], got)
        same_logprobs(alone[1][name], [got])


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize(("case", "name"), [("cp2-dp2", "nemotron"), ("cp2-tp2-sp", "wide"), ("cp2-pp2", "nemotron")])
def test_context_parallel_beside_data_tensor_and_pipeline_parallel(alone, four, case, name, packing):
    results = read(four, case, name, packing, 4)
    for got in results:
        same_numbers(alone[1][name], got)
    same_logprobs(alone[1][name], results)
