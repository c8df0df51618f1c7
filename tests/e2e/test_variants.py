"""The same loop at other settings: expert, tensor and pipeline parallelism, no staleness, prompts of one's own, reasoning-gym."""

import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open

from megatron_agentrl.layout.megatron import hf_tensors
from tests.e2e.runs import ROOT, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def from_export(trained):
    """Overrides that start from the trained model: no warm start to wait for."""
    return (f"model.path={trained.folder / 'export'}", "model.init=pretrained", "warm_start.steps=0", "eval.every=0")


def test_ep2_over_dp2_trains_and_every_update_is_proven(from_export, tmp_path):
    done = run(tmp_path / "ep2", "train", *from_export, "topology.world=2", "topology.ep=2", "train.steps=8", "eval.size=32")
    assert done.code == 0, done.stderr[-3000:]
    publishes = done.metrics("publish")
    assert [p["version"] for p in publishes] == list(range(9))
    assert max(p["gap"] for p in publishes) <= 1e-4
    assert done.summary["staleness_max"] == 1


@pytest.mark.parametrize(
    "topology",
    [("topology.tp=2", "topology.sequence_parallel=true"), ("topology.pp=2", "topology.vpp=3")],
    ids=["tensor parallel", "interleaved pipeline"],
)
def test_the_model_cut_over_two_trainers_serves_and_exports_what_it_trained(from_export, tmp_path, topology):
    short = ("topology.world=2", "train.steps=3", "train.batch=8", "eval.size=32")
    done = run(tmp_path / "cut", "train", *from_export, *short, *topology)
    assert done.code == 0, done.stderr[-3000:]
    publishes = done.metrics("publish")
    assert [p["version"] for p in publishes] == [0, 1, 2, 3]
    assert max(p["gap"] for p in publishes) <= 1e-4
    exported = {key for file in (done.folder / "export").glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118
    assert exported == set(hf_tensors(json.loads((done.folder / "export" / "config.json").read_text())))


def test_eta_zero_trains_on_policy_throughout(from_export, tmp_path):
    done = run(tmp_path / "eta0", "train", *from_export, "staleness.eta=0", "train.steps=5", "eval.size=32")
    assert done.code == 0, done.stderr[-3000:]
    assert [step["staleness_max"] for step in done.metrics("train")] == [0] * 5
    assert done.summary["staleness_max"] == 0


def test_prompts_of_ones_own_in_a_run_folder_named_relatively(from_export, tmp_path):
    mine, held_out = tmp_path / "mine.jsonl", tmp_path / "held_out.jsonl"
    mine.write_text("".join(json.dumps({"prompt": f"{a}+{b}=?", "answer": str(a + b), "source": "mine"}) + "\n" for a in range(10, 30) for b in (11, 23)))
    held_out.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"{a}+44=?"}], "answer": str(a + 44)}) + "\n" for a in range(10, 30)))
    relative = Path(os.path.relpath(tmp_path, ROOT))
    done = run(relative / "own", "train", *from_export, f"data.prompts={mine}", f"data.eval={held_out}", "train.steps=3", "eval.size=20")
    assert done.code == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["success_before"] > 0.5  # it has learned addition


def test_reasoning_gym_is_a_prompt_source(from_export, tmp_path):
    done = run(
        tmp_path / "gym", "train", *from_export, "data.source=reasoning_gym", "data.task=chain_sum", "data.size=64",
        "data.eval_size=16", "eval.size=16", "model.max_length=256", "train.steps=3", "train.batch=4",
    )  # fmt: skip
    assert done.code == 0, done.stderr[-3000:]
    assert done.summary["steps"] == 3
