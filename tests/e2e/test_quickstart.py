"""The quickstart as a newcomer runs it: it learns to use the tool, and every guarantee holds on the way."""

import json
import math
import shutil

import pytest

from megatron_agentrl.trajectory.spool import SpoolReader, scan
from megatron_agentrl.trajectory.types import NOT_SAMPLED
from tests.e2e.runs import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_it_learns_to_answer_through_the_tool(trained):
    summary = trained.summary
    assert summary["success_before"] <= 0.40
    assert summary["success_after"] >= 0.80
    assert abs(summary["success_after"] - summary["success_through_tool_after"]) <= 0.01
    assert summary["steps"] >= 40


def test_every_update_is_proven_by_the_canary(trained):
    publishes = trained.metrics("publish")
    assert [p["version"] for p in publishes] == list(range(trained.summary["steps"] + 1))
    assert max(p["gap"] for p in publishes) <= 1e-4
    assert trained.summary["logprob_gap_max"] == max(p["gap"] for p in publishes)


def test_staleness_reaches_the_bound_and_never_exceeds_it(trained):
    assert trained.summary["staleness_bound"] == 1
    assert max(step["staleness_max"] for step in trained.metrics("train")) == 1
    assert trained.summary["staleness_max"] == 1


def test_engines_generate_while_the_trainer_trains(trained):
    assert 0.5 <= trained.summary["overlap"] <= 1.0


def test_every_sampled_token_has_a_logprob_and_a_version(trained):
    reader, tokens = SpoolReader(trained.folder), 0
    for path in sorted((trained.folder / "spool").glob("*.spool")):
        for where, _ in scan(path):
            where.file = str(path.relative_to(trained.folder))
            for segment in reader.read(where).segments:
                for mask, logprob, version in zip(segment.loss_mask, segment.logprobs, segment.versions, strict=True):
                    assert (version != NOT_SAMPLED) == bool(mask)
                    assert math.isfinite(logprob) and logprob <= 0
                    tokens += mask
    assert tokens >= trained.summary["tokens_trained"] > 0


def test_a_second_start_of_a_finished_run_changes_nothing(trained):
    before = (trained.folder / "metrics.jsonl").read_bytes()
    again = run(trained.folder, "train")
    assert again.code == 0
    assert (trained.folder / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def evaluated_greedily(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "greedy"
    done = run(folder, "eval", f"model.path={trained.folder / 'export'}", "model.init=pretrained", "eval.temperature=0")
    assert done.code == 0, done.stderr[-3000:]
    return done


def test_the_export_served_by_vllm_succeeds_as_often_as_the_trainer_said(trained, tmp_path):
    done = run(tmp_path / "served", "eval", f"model.path={trained.folder / 'export'}", "model.init=pretrained")
    assert done.code == 0, done.stderr[-3000:]
    served = json.loads((done.folder / "eval.json").read_text())
    p, n = trained.summary["success_after"], served["size"]
    assert abs(served["success"] - p) <= 3 * math.sqrt(2 * p * (1 - p) / n) + 1e-9


def test_greedy_answers_of_vllm_are_the_argmax_of_transformers(trained, evaluated_greedily):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = trained.folder / "export"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    assert AutoTokenizer.from_pretrained(export).vocab_size > 0
    reader, sampled, different = SpoolReader(evaluated_greedily.folder), 0, 0
    for path in sorted((evaluated_greedily.folder / "spool").glob("*.spool")):
        for where, _ in scan(path):
            where.file = str(path.relative_to(evaluated_greedily.folder))
            for segment in reader.read(where).segments:
                with torch.no_grad():
                    best = model(torch.tensor([segment.token_ids])).logits[0].argmax(-1).tolist()
                for t, mask in enumerate(segment.loss_mask):
                    sampled += mask
                    different += bool(mask) and best[t - 1] != segment.token_ids[t]
    assert sampled > 2000
    assert different == 0


def test_export_of_the_newest_checkpoint_is_the_same_model(trained, tmp_path):
    from safetensors.torch import load_file

    folder = tmp_path / "again"
    shutil.copytree(trained.folder, folder, ignore=shutil.ignore_patterns("export", "spool"))
    done = run(folder, "export")
    assert done.code == 0, done.stderr[-3000:]
    first, second = (load_file(f / "export" / "model.safetensors") for f in (trained.folder, folder))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)
