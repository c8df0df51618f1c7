"""Kill −9 each kind of process in turn: the run ends with its name, leaves nothing behind, and goes on where it was."""

import json
import re
import signal
import time

import pytest

from tests.e2e.runs import start, survivors, tree, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    "eval.every=0",
    "eval.size=16",
    "checkpoint.every=2",
    "train.steps=400",
    "train.batch=4",
    "algorithm.group_size=4",
)


def lines(folder, kind):
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in found if line["kind"] == kind]


def checkpoints(folder):
    return sorted(int(p.name[5:]) for p in (folder / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", p.name))


def part(processes, role):
    """The process of a role among those of a run."""
    found = [p for p in processes if f"megatron_agentrl.app.{role}" in p.cmdline()]
    assert len(found) == 1, f"{role}: {len(found)} processes"
    return found[0]


@pytest.fixture(scope="module")
def words(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "killed"
    return folder, ("train", "recipe=quickstart", f"run_root={folder.parent}", f"run_name={folder.name}",
                    f"model.path={trained.folder / 'export'}", "model.init=pretrained", "warm_start.steps=0", *SMALL)  # fmt: skip


@pytest.mark.parametrize("role", ["trainer", "engine", "gateway", "worker", "coordinator"])
def test_a_killed_process_ends_the_run_by_name_and_a_restart_goes_on(words, role):
    folder, command = words
    resumed_from = checkpoints(folder)[-1] if folder.exists() and checkpoints(folder) else None
    began = time.time()
    # The first start writes its checkpoints in the background, and is killed while it does or between two; the next
    # ones resume from what it completed.
    process = start(*command, f"checkpoint.asynchronous={str(role == 'trainer').lower()}")
    wait_for(
        lambda: process.poll() is not None or len([x for x in lines(folder, "train") if x["time"] > began]) >= 3,
        180,
        "three steps of this start",
    )
    assert process.poll() is None, process.communicate()[1][-3000:]
    trained = lines(folder, "train")
    steps = [x["step"] for x in trained]
    assert steps == list(range(1, steps[-1] + 1)), "a step is missing or was counted twice"
    # the restart cut what came after its checkpoint and went on at checkpoint + 1
    assert [x["step"] for x in trained if x["time"] > began][0] == (resumed_from or 0) + 1
    processes = tree(process)
    killed = time.monotonic()
    part(processes, role).send_signal(signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - killed <= 30
    assert process.returncode == 1
    assert role in stderr and "SIGKILL" in stderr
    wait_for(lambda: not survivors(processes), 5, f"nothing left running: {survivors(processes)}")


def test_ctrl_c_stops_cleanly(words):
    folder, command = words
    began = time.time()
    process = start(*command)
    # lines of the earlier start lie in the file until the trainer has resumed
    wait_for(lambda: [x for x in lines(folder, "train") if x["time"] > began], 180, "a step after the restart")
    processes = tree(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert survivors(processes) == []
