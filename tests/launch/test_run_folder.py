"""Run folders and endpoints: resumed, set aside, never shared, never lost."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_agentrl.launch.endpoints import Endpoints, bind, choose, free_ports, host_of, port_of
from megatron_agentrl.launch.run_folder import locked, newest_checkpoint, prepare
from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.load import load_resolved
from megatron_agentrl.recipe.schema import Recipe


def recipe(**train: int) -> Recipe:
    made = Recipe(run_name="x")
    made.model.path = "model"
    for name, value in train.items():
        setattr(made.train, name, value)
    return made


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A run of 100 steps that was stopped after its checkpoint at step 20."""
    path = tmp_path / "x"
    prepare(recipe(), path)
    (path / "checkpoints" / "step_20").mkdir()
    (path / "ledger.sqlite").write_text("ledger")
    return path


def test_a_new_run_gets_its_folders_and_its_recipe(tmp_path):
    folder = prepare(recipe(), tmp_path / "runs" / "x")
    assert (folder.resumes_at, folder.finished, folder.notes) == (None, False, [])
    assert load_resolved(folder.path / "recipe.yaml") == recipe()
    assert {path.name for path in folder.path.iterdir()} == {"recipe.yaml", "logs", "events", "spool", "checkpoints"}


def test_a_stopped_run_goes_on_from_its_newest_checkpoint(started):
    (started / "checkpoints" / "step_9").mkdir()
    (started / "checkpoints" / "step_30.tmp").mkdir()
    folder = prepare(recipe(steps=200), started)
    assert (folder.resumes_at, folder.finished) == (20, False)
    assert folder.notes == [f"{started}: going on from step 20"]
    assert load_resolved(started / "recipe.yaml").train.steps == 200


def test_checkpoint_steps_are_compared_as_numbers(tmp_path):
    for name in ("step_9", "step_10", "step_x", "step_11.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 10


def test_a_run_with_another_recipe_is_set_aside_whole(started):
    first = prepare(recipe(batch=3), started)
    assert first.resumes_at is None
    assert first.notes == [f"{started} is set aside as {started}.1: the recipe differs (train.batch: 16 -> 3)"]
    assert (started.with_name("x.1") / "ledger.sqlite").read_text() == "ledger"
    assert not (started / "ledger.sqlite").exists()
    second = prepare(recipe(batch=4), started)
    assert "x.2" in second.notes[0]


def test_a_run_without_a_checkpoint_is_set_aside(tmp_path):
    prepare(recipe(), tmp_path / "x")
    again = prepare(recipe(), tmp_path / "x")
    assert "no checkpoint to go on from" in again.notes[0]
    assert (tmp_path / "x.1" / "recipe.yaml").is_file()


def test_a_run_whose_recipe_cannot_be_read_is_set_aside(started):
    (started / "recipe.yaml").write_text("old_key: 1\n")
    assert "its recipe cannot be read" in prepare(recipe(), started).notes[0]


def test_a_finished_run_stays_as_it_is_until_more_steps_are_asked_for(started):
    (started / "checkpoints" / "step_100").mkdir()
    (started / "summary.json").write_text("{}")
    folder = prepare(recipe(), started)
    assert folder.finished
    assert folder.notes == [f"{started} is finished; raise train.steps to go on"]
    more = prepare(recipe(steps=120), started)
    assert (more.finished, more.resumes_at) == (False, 100)
    assert not (started / "summary.json").exists()


def test_a_run_that_ended_early_because_its_prompts_ran_out_is_finished(started):
    (started / "summary.json").write_text("{}")
    assert prepare(recipe(), started).finished


def test_a_folder_that_is_no_run_is_refused_and_untouched(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("mine")
    with pytest.raises(RecipeError, match="so it is no run folder"):
        prepare(recipe(), tmp_path / "x")
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(RecipeError, match="is a file, expected a run folder"):
        prepare(recipe(), tmp_path / "x", fresh=True)
    with pytest.raises(RecipeError, match="cannot be written"), locked(tmp_path / "x" / "y"):
        pass


def test_two_starts_in_one_folder_refuse_and_a_dead_one_leaves_no_lock(tmp_path):
    hold = (
        "import sys, time; from pathlib import Path; from megatron_agentrl.launch.run_folder import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "x")], stdout=subprocess.PIPE, env=env)
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(RecipeError, match=rf"another start \(process {other.pid}\)"), locked(tmp_path / "x"):
        pass
    other.kill()
    other.communicate()
    with locked(tmp_path / "x"):
        pass


def test_endpoints_come_back_and_are_for_the_owner_only(tmp_path):
    endpoints = choose("127.0.0.1", 2)
    path = endpoints.write(tmp_path)
    assert Endpoints.read(tmp_path) == endpoints
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    endpoints.write(tmp_path)  # a second start replaces it
    assert [file.name for file in tmp_path.iterdir()] == ["endpoints.json"]


def test_chosen_ports_differ_and_given_ones_are_kept():
    with bind("127.0.0.1", 0) as probe:
        wanted = probe.getsockname()[1]
    endpoints = choose("127.0.0.1", 3, gateway=wanted)
    ports = [
        port_of(url)
        for url in (
            endpoints.coordinator, endpoints.gateway, *endpoints.engines, endpoints.trainer_master, *endpoints.transfer
        )
    ]  # fmt: skip
    assert port_of(endpoints.gateway) == wanted
    assert len(set(ports)) == 2 + 3 + 1 + 3
    assert host_of(endpoints.gateway) == "127.0.0.1"
    assert len(endpoints.token) >= 32


def test_free_ports_are_none_that_the_system_gives_to_outgoing_connections():
    """The engine listens half a minute after its port was chosen."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports("127.0.0.1", 40)
    assert len(set(ports)) == 40
    assert all(10000 <= port < low or high < port < 65536 for port in ports)


def test_a_taken_port_is_named():
    with bind("127.0.0.1", 0) as owner:
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1"):
            choose("127.0.0.1", 1, coordinator=port)
