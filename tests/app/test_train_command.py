"""`train` from start to finish with scripted parts in place of the real processes: folder, resume, summary, codes."""

import json
import sys
from pathlib import Path

import pytest
from test_cli import folder  # noqa: F401  (the fixture: a working folder in which recipe=good is valid)

from megatron_agentrl.app.cli import main
from megatron_agentrl.launch.supervisor import Role

REPOSITORY = Path(__file__).parents[2]
TRAINER = """
import json, sys
from pathlib import Path
from megatron_agentrl.observe.events import EventLog
from megatron_agentrl.observe.metrics import MetricsWriter
from megatron_agentrl.recipe.load import load_resolved
run, stop_at = Path(sys.argv[1]), int(sys.argv[2])
recipe = load_resolved(run / "recipe.yaml")
done = [int(p.name[5:]) for p in (run / "checkpoints").iterdir()]
version = max(done, default=0)
metrics, events = MetricsWriter(run, False, max(done, default=None)), EventLog(run, "trainer-0")
evaluate = lambda tag: metrics.log("eval", version, {"tag": tag, "success": version / 10, "size": 10, "agent/through_tool": 0.1})
if not done:
    evaluate("before")
while version < recipe.train.steps:
    with events.span("train", step=version):
        version += 1
    metrics.log("train", version, {"reward": 0.5, "staleness_mean": 0.5, "staleness_max": 1, "tokens_sampled": 11, "tokens_trained": 10})
    (run / "checkpoints" / f"step_{version}").mkdir()
    if version == stop_at:
        raise SystemExit("the trainer lost its engine")
evaluate("after")
(run / "export").mkdir(exist_ok=True)
(run / "export" / "config.json").write_text("{}")
"""


@pytest.fixture
def train(folder, monkeypatch):  # noqa: F811
    """Runs `train recipe=good` in the folder with a scripted trainer that dies after step `stop_at`."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def command(*overrides: str, stop_at: int = -1) -> int:
        def scripted(recipe, run_dir, endpoints, mode):
            argv = [sys.executable, "-c", TRAINER, str(run_dir), str(stop_at)]
            idle = [sys.executable, "-c", "import time; time.sleep(600)"]
            return [Role("worker-0", idle), Role("trainer-0", argv, decides=True)]

        monkeypatch.setattr("megatron_agentrl.app.roles.roles", scripted)
        return main(["train", "recipe=good", "observe.tensorboard=false", *overrides])

    return command


def steps(path: str) -> list[int]:
    lines = map(json.loads, Path(path, "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "train"]


def test_a_run_ends_with_its_summary_plot_and_commands(train, capsys):
    assert train("train.steps=4") == 0
    summary = json.loads(Path("runs/good/summary.json").read_text())
    assert (summary["success_before"], summary["success_after"], summary["steps"]) == (0.0, 0.4, 4)
    assert (summary["tokens_sampled"], summary["tokens_trained"]) == (44, 40)
    assert Path("runs/good/reward.png").is_file()
    shown = capsys.readouterr().out
    assert "success after" in shown
    assert "-m vllm.entrypoints.openai.api_server --model runs/good/export" in shown
    assert '"content": "2+2=?"' in shown


def test_a_failed_run_says_who_and_goes_on_when_started_again(train, capsys):
    assert train("train.steps=4", stop_at=2) == 1
    err = capsys.readouterr().err
    assert err.startswith("trainer-0 ended with exit code 1")
    assert "the trainer lost its engine" in err
    assert not Path("runs/good/summary.json").exists()
    assert train("train.steps=4") == 0
    assert "runs/good: going on from step 2" in capsys.readouterr().err
    assert steps("runs/good") == [1, 2, 3, 4]


def test_a_finished_run_says_so_and_trains_no_further_step(train, capsys):
    assert train("train.steps=2") == 0
    capsys.readouterr()
    assert train("train.steps=2") == 0
    captured = capsys.readouterr()
    assert "runs/good is finished" in captured.err
    assert "success after" in captured.out
    assert steps("runs/good") == [1, 2]
    assert train("train.steps=3") == 0
    assert steps("runs/good") == [1, 2, 3]
    assert sorted(path.name for path in Path("runs").iterdir()) == [".good.lock", "good"]


def test_another_recipe_sets_the_old_run_aside(train, capsys):
    assert train("train.steps=2") == 0
    assert train("train.steps=2", "seed=1") == 0
    assert "runs/good is set aside as runs/good.1: the recipe differs (seed: 0 -> 1)" in capsys.readouterr().err
    assert Path("runs/good.1/summary.json").is_file()
    assert steps("runs/good") == [1, 2]
