"""gpu-check on a machine without a GPU: skips with reasons, and runs what a CPU can when asked."""

from __future__ import annotations

import json

import pytest

from megatron_agentrl.app import gpu_check
from megatron_agentrl.app.gpu_check import Check, Row
from megatron_agentrl.recipe.schema import Fp8Recipe

H200 = {"gpus": 8, "on_cpu": False, "te_missing": None, "capability": 9.0}


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu_check, "gpu_count", lambda: 0)


def test_without_a_gpu_every_check_is_skipped_with_a_reason_and_the_exit_code_is_0(no_gpu, capsys, tmp_path):
    assert gpu_check.main(["--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == len(gpu_check.checks()) == 27
    assert {row["result"] for row in rows} == {"skipped"}
    assert all(row["reason"] for row in rows)
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["check", "result", "measured", "allowed", "seconds", "reason"]
    assert out.rstrip().endswith("0 passed, 0 failed, 27 skipped")


@pytest.mark.parametrize(
    ("check", "machine", "reason"),
    [
        (Check("a", "", "steps", 2), H200 | {"gpus": 1}, "needs 2 GPUs, found 1"),
        (Check("a", "", "steps", needs_te=True), H200 | {"te_missing": "Transformer Engine is not installed"},
         "Transformer Engine is not installed"),
        (Check("a", "", "steps", fp8=Fp8Recipe.mxfp8), H200, "needs compute capability 10.0, found 9.0"),
        (Check("a", "", "steps", fp8=Fp8Recipe.blockwise), H200, None),
        (Check("a", "", "steps", settings={"topology.none_such": "1"}), H200, "this version has no topology.none_such"),
        (Check("a", "", "steps", needs_gpu=True), H200 | {"gpus": 0, "on_cpu": True}, "no GPU"),
        (Check("a", "", "steps", 2), H200 | {"gpus": 0, "on_cpu": True}, None),
    ],
)  # fmt: skip
def test_what_a_machine_cannot_run(check, machine, reason):
    assert gpu_check.why_not(check, **machine) == reason


@pytest.mark.parametrize(
    ("found", "row"),
    [
        ({"measured": 1e-6}, ("passed", "")),
        ({"measured": 2e-5}, ("failed", "beyond the tolerance")),
        ({"measured": float("nan")}, ("failed", "beyond the tolerance")),
        ({"measured": 0.0, "fault": "the loss does not fall"}, ("failed", "the loss does not fall")),
        ({"refused": "topology.cp=2: not yet"}, ("skipped", "refused: topology.cp=2: not yet")),
    ],
)
def test_a_check_that_disagrees_fails(found, row):
    made = gpu_check._judge(Check("a", "", "steps", tolerance=1e-5), found | {"seconds": 1.0})
    assert (made.result, made.reason) == row


@pytest.mark.slow
def test_a_rank_that_dies_fails_its_check_and_the_exit_code_is_1(no_gpu, monkeypatch, capsys):
    broken = Check("broken", "", "no-such-kind")
    monkeypatch.setattr(gpu_check, "checks", lambda: [broken])
    assert gpu_check.main(["--cpu"]) == 1
    assert "KeyError: 'no-such-kind'" in capsys.readouterr().out


def test_the_table_is_aligned():
    lines = gpu_check.table(
        [Row("long-name", "passed", 1.5e-6, 1e-5, 2.0), Row("b", "skipped", reason="no GPU")]
    ).splitlines()
    assert lines[0].index("result") == lines[1].index("passed") == lines[2].index("skipped")
    assert lines[0].index("reason") == lines[2].index("no GPU")


@pytest.mark.parametrize("arguments", [["--only", "none-such"], ["--json", "/no/such/folder/f.json"], ["--bogus"]])
def test_bad_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.slow
def test_on_a_cpu_the_checks_really_run(capsys):
    assert gpu_check.main(["--cpu", "--only", "[elr]*"]) == 0
    lines = {
        line.split()[0]: line.split()[1]
        for line in capsys.readouterr().out.splitlines()
        if "/" in line or "one-" in line
    }
    assert lines["one-process"] == lines["recompute/full"] == lines["logprobs/values"] == "passed"
    assert lines["engine/spec"] == "skipped"
