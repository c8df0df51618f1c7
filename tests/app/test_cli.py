"""The command line as a user meets it: a process, its exit code, and one clear line on stderr."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quickstart_shape import CONFIG, write_model

from megatron_agentrl.app.roles import roles
from megatron_agentrl.launch.endpoints import choose
from megatron_agentrl.recipe.load import load, save
from megatron_agentrl.recipe.schema import Recipe

REPOSITORY = Path(__file__).parents[2]
DEMONSTRATION = {"messages": [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?", "answer": "3"}\n')
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "2+2=?", "answer": "4"}\n')
    with gzip.open(tmp_path / "demonstrations.jsonl.gz", "wt") as file:
        file.write(json.dumps(DEMONSTRATION) + "\n")
    (tmp_path / "my_agent.py").write_text("raise RuntimeError('imported')\n\nclass MyAgent: ...\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "good.yaml").write_text(
        "model:\n  path: model\n  init: random\n  max_length: 128\n"
        "data:\n  prompts: train.jsonl\n  eval: held_out.jsonl\n"
        "warm_start:\n  steps: 4\n  data: demonstrations.jsonl.gz\n"
        "agent:\n  cls: my_agent:MyAgent\n"
        "sampling:\n  max_tokens: 14\n  max_response_tokens: 56\n"
    )
    return tmp_path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_agentrl.app.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_good_recipe_is_described(folder):
    done = command(folder, "check", "recipe=good")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "model: model, nemotron_h, 734,400 parameters, random weights",
        "topology: 1 trainer process(es): dp 1, ep 1",
        "batch: 16 prompts x 8 trajectories = 128, 100 steps, staleness at most 1",
        "warm start: 1 demonstrations, 4 steps",
        "prompts: 2 to train on, 1 held out",
    ):
        assert text in done.stdout
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lr=1e-6"], "unknown key lr; did you mean optimizer.lr"),
        (["model.path=nowhere"], "model.path=nowhere: does not exist"),
        (["algorithm.group_size=1"], "set algorithm.group_size=2 or more"),
        (["topology.world=3", "topology.ep=2"], "etp·ep·pp = 1·2·1 = 2 does not divide world = 3"),
        (["data.eval=train.jsonl"], "is also a training prompt"),
        (["agent.cls=my_agent:MyAgnt"], "did you mean MyAgent?"),
        (["agent.cls=no.such.module:X"], "there is no module no.such.module"),
        (["agent.cls=my_agent"], "expected module:Class"),
        (["rollout.kv_cache_gib=100000"], "memory: the run needs about"),
        (["run_root=train.jsonl/x"], "train.jsonl is a file"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(folder, overrides, words):
    done = command(folder, "train", "recipe=good", *overrides)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.jsonl", '{"prompt": "a", "answer": "1"}\n{"prompt": \n', "train.jsonl:2: not JSON"),
        ("train.jsonl", '{"answer": "1"}\n', "train.jsonl:1: has neither prompt nor messages"),
        ("train.jsonl", "", "train.jsonl: holds no lines"),
        ("held_out.jsonl", '\n{"prompt": 3, "answer": "1"}\n', "held_out.jsonl:2: prompt is the number 3"),
        ("demonstrations.jsonl.gz", "plain text", "demonstrations.jsonl.gz: not a whole gzip file"),
    ],
)
def test_a_broken_data_file_is_named_with_its_line(folder, name, text, words):
    (folder / name).write_text(text)
    done = command(folder, "check", "recipe=good")
    assert done.returncode == 2
    assert words in done.stderr


def test_an_unknown_reasoning_gym_task_is_refused_with_the_nearest(folder):
    done = command(
        folder, "check", "recipe=good", "data.source=reasoning_gym", "data.prompts=null", "data.eval=null",
        "data.task=chain_sums",
    )  # fmt: skip
    assert done.returncode == 2
    assert "did you mean chain_sum?" in done.stderr


def test_the_table_of_keys_and_the_resolved_values(folder):
    table = command(folder, "recipe")
    assert table.returncode == 0
    assert "optimizer.lr=1e-06  (float)\n    Peak learning rate." in table.stdout
    resolved = command(folder, "recipe", "recipe=good", "seed=5")
    assert "seed=5  (int)" in resolved.stdout
    assert "data.prompts=train.jsonl  (str or null)" in resolved.stdout


@pytest.mark.parametrize("cls", ["Tried", "Imported", "Annotated"])
def test_an_agent_that_is_defined_under_a_condition_is_found(folder, cls):
    (folder / "my_agent.py").write_text(
        "try:\n    from nowhere import Tried\nexcept ImportError:\n    class Tried: ...\n"
        "if True:\n    from pathlib import Path as Imported\nAnnotated: type = int\n"
    )
    assert command(folder, "check", "recipe=good", f"agent.cls=my_agent:{cls}").returncode == 0


def test_an_agent_in_a_package_that_cannot_be_imported_is_one_line(folder):
    (folder / "broken").mkdir()
    (folder / "broken" / "__init__.py").write_text("raise RuntimeError('no key in the environment')\n")
    (folder / "broken" / "agent.py").write_text("class A: ...\n")
    done = command(folder, "check", "recipe=good", "agent.cls=broken.agent:A")
    assert done.returncode == 2
    assert done.stderr == (
        "error: agent.cls=broken.agent:A: importing the package of broken.agent fails: RuntimeError: no key in the "
        "environment\n"
    )


def test_a_config_with_a_null_size_is_one_line(folder):
    (folder / "model" / "config.json").write_text(json.dumps({**CONFIG, "n_groups": None}))
    done = command(folder, "check", "recipe=good")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "model/config.json: n_groups is missing" in done.stderr


def test_an_export_takes_the_runs_own_recipe_or_says_what_differs(folder):
    run = folder / "runs" / "good"
    (run / "checkpoints" / "step_3").mkdir(parents=True)
    save(load(["recipe=good"], folder / "recipes"), run / "recipe.yaml")
    done = command(folder, "export", "recipe=good", "seed=5")
    assert done.returncode == 2
    assert "was trained with another recipe (seed: 0 -> 5)" in done.stderr
    assert "recipe=runs/good/recipe.yaml" in done.stderr


def test_export_without_a_checkpoint_is_refused(folder):
    done = command(folder, "export", "recipe=good")
    assert done.returncode == 2
    assert "runs/good: holds no checkpoint to export" in done.stderr


def test_help_shows_examples():
    done = command(REPOSITORY, "train", "--help")
    assert done.returncode == 0
    assert "megatron-agentrl train recipe=quickstart" in done.stdout


def test_checking_loads_no_torch(folder):
    code = (
        "import sys; from megatron_agentrl.app.cli import main\n"
        "assert main(['check', 'recipe=good']) == 0\n"
        "slow = {'torch', 'transformers', 'vllm', 'megatron', 'matplotlib', 'tensorboard', 'reasoning_gym'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, check=True, capture_output=True)


def test_the_roles_of_each_mode():
    recipe = Recipe(run_name="x")
    recipe.topology.world, recipe.rollout.replicas, recipe.agent.workers = 2, 2, 1
    endpoints = choose("127.0.0.1", 2)
    by_mode = {mode: roles(recipe, Path("runs/x"), endpoints, mode) for mode in ("train", "sft", "export", "eval")}
    servers = ["coordinator-0", "engine-0", "engine-1", "gateway-0", "worker-0"]
    assert [role.name for role in by_mode["train"]] == [*servers, "trainer-0", "trainer-1"]
    assert [role.name for role in by_mode["sft"]] == ["trainer-0", "trainer-1"]
    assert [role.name for role in by_mode["export"]] == ["trainer-0", "trainer-1"]
    assert [role.name for role in by_mode["eval"]] == [*servers, "evaluate-0"]
    assert [role.name for role in by_mode["train"] if role.decides] == ["trainer-0", "trainer-1"]
    trainer = by_mode["train"][-1]
    assert (
        " ".join(trainer.argv[1:])
        == f"-m megatron_agentrl.app.trainer --run {Path.cwd()}/runs/x --index 1 --mode train"
    )
    assert by_mode["train"][1].health_url == endpoints.engines[0]


def test_the_runs_own_traffic_goes_through_no_proxy_by_either_name(monkeypatch):
    monkeypatch.setenv("no_proxy", "a.example")
    monkeypatch.setenv("NO_PROXY", "b.example")
    recipe = Recipe(run_name="x")
    recipe.ports.host = "10.0.0.1"
    for role in roles(recipe, Path("runs/x"), choose("127.0.0.1", 1), "train"):
        assert role.env["no_proxy"] == role.env["NO_PROXY"] == "a.example,b.example,127.0.0.1,localhost,10.0.0.1"
