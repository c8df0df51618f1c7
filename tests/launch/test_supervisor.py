"""The supervisor with real, small processes: who dies is named, and nothing is ever left."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_agentrl.launch.endpoints import Endpoints, bind, free_ports
from megatron_agentrl.launch.supervisor import Role, run
from megatron_agentrl.recipe.schema import Recipe

HERE = Path(__file__).parent


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    Endpoints("secret", "", "", [], "", []).write(tmp_path)
    return tmp_path


@pytest.fixture
def port() -> int:
    return free_ports("127.0.0.1", 1)[0]


def part(name: str, *args: object, **fields: object) -> Role:
    return Role(name=name, argv=[sys.executable, str(HERE / "part.py"), *map(str, args)], **fields)


def supervise(run_dir: Path, *roles: Role, stop: float = 1.0) -> tuple[int, str, float]:
    recipe, err = Recipe(), io.StringIO()
    recipe.deadlines.stop = stop
    start = time.monotonic()
    code = run(recipe, roles, run_dir, err=err)
    return code, err.getvalue(), time.monotonic() - start


def started(run_dir: Path) -> dict[str, int]:
    lines = [json.loads(line) for line in (run_dir / "events" / "supervisor-0.jsonl").read_text().splitlines()]
    return {line["role"]: line["pid"] for line in lines if line["name"] == "started"}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.05)


def assert_free(port: int) -> None:
    bind("127.0.0.1", port).close()


def test_a_run_ends_well_when_the_deciding_roles_do(run_dir, port):
    code, err, _ = supervise(
        run_dir,
        part("gateway-0", "--port", port, health_url=f"http://127.0.0.1:{port}"),
        part("trainer-0", "--after", 0.6, decides=True),
        part("trainer-1", "--after", 0.9, decides=True),
    )
    assert (code, err) == (0, "")
    assert not any(alive(pid) for pid in started(run_dir).values())
    assert_free(port)


def test_a_dead_part_ends_the_run_with_its_name_code_and_last_lines(run_dir, port):
    code, err, seconds = supervise(
        run_dir,
        part("gateway-0", "--port", port, health_url=f"http://127.0.0.1:{port}"),
        part("engine-0", "--after", 0.5, "--code", 3, "--say", "weights do not fit"),
        part("trainer-0", decides=True),
    )
    assert code == 1
    assert err.splitlines()[0] == "engine-0 ended with exit code 3; the run stops."
    assert "  | weights do not fit" in err
    assert str(run_dir / "logs" / "engine-0.log") in err
    assert seconds < 10
    assert not any(alive(pid) for pid in started(run_dir).values())
    assert_free(port)


def test_a_part_that_leaves_early_is_a_failure_even_with_code_0(run_dir):
    code, err, _ = supervise(run_dir, part("worker-0", "--after", 0.2), part("trainer-0", decides=True))
    assert code == 1
    assert err.startswith("worker-0 ended before the run was over with exit code 0")


def test_a_killed_part_is_named_with_its_signal(run_dir):
    victim = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    code, err, _ = supervise(run_dir, Role("engine-0", victim), part("trainer-0", decides=True))
    assert code == 1
    assert err.startswith("engine-0 ended with signal SIGKILL")


def test_only_the_last_lines_of_this_start_are_shown(run_dir):
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "engine-0.log").write_text("of an earlier start\n")
    many = "for i in range(100): print('line', i)\nraise SystemExit(4)"
    code, err, _ = supervise(run_dir, Role("engine-0", [sys.executable, "-c", many]), part("trainer-0", decides=True))
    assert code == 1
    assert "line 99" in err
    assert "line 79" not in err
    assert "of an earlier start" in (run_dir / "logs" / "engine-0.log").read_text()


def test_a_server_that_does_not_come_up_is_named(run_dir, port):
    late = part("engine-0", health_url=f"http://127.0.0.1:{port}", start_deadline=0.6)
    code, err, seconds = supervise(run_dir, late, part("trainer-0", decides=True))
    assert code == 1
    assert err.startswith(f"engine-0 did not answer http://127.0.0.1:{port}/health within 0.6 s")
    assert seconds < 8


def test_a_part_that_ignores_sigterm_and_its_child_are_killed_after_the_deadline(run_dir):
    pid_file = run_dir / "pid"
    code, _, seconds = supervise(
        run_dir,
        part("engine-0", "--deaf", "--grandchild", pid_file),
        part("trainer-0", "--after", 1.5, decides=True),
        stop=0.5,
    )
    assert code == 0
    assert not alive(int(pid_file.read_text()))
    assert not any(alive(pid) for pid in started(run_dir).values())
    assert seconds < 10


def test_states_are_reported_while_the_run_goes_on(run_dir, port):
    seen: list[dict[str, str]] = []
    roles = [
        part("gateway-0", "--port", port, health_url=f"http://127.0.0.1:{port}"),
        part("trainer-0", "--after", 2.5, decides=True),
    ]
    assert run(Recipe(), roles, run_dir, on_tick=seen.append) == 0
    assert seen[0] == {"gateway-0": "starting", "trainer-0": "running"}
    assert seen[-1] == {"gateway-0": "running", "trainer-0": "running"}


def launch(run_dir: Path, port: int) -> subprocess.Popen[str]:
    """A supervisor process with a server that has a stubborn child; returns once both are up."""
    pid_file = run_dir / "pid"
    roles = [
        part("gateway-0", "--port", port, "--grandchild", pid_file, health_url=f"http://127.0.0.1:{port}"),
        part("trainer-0", decides=True),
    ]
    supervisor = subprocess.Popen(
        [sys.executable, str(HERE / "supervise.py"), str(run_dir), json.dumps([vars(role) for role in roles])],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )
    events = run_dir / "events" / "supervisor-0.jsonl"
    wait_until(lambda: events.exists() and '"ready"' in events.read_text())
    return supervisor


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_supervisor_stops_everything_and_returns_130(run_dir, port, number):
    supervisor = launch(run_dir, port)
    supervisor.send_signal(number)
    _, err = supervisor.communicate(timeout=15)
    assert supervisor.returncode == 130
    assert err.startswith(f"{number.name}: stopping the run")
    assert not any(alive(pid) for pid in [*started(run_dir).values(), int((run_dir / "pid").read_text())])
    assert_free(port)


def test_nothing_survives_a_killed_supervisor(run_dir, port):
    supervisor = launch(run_dir, port)
    pids = [*started(run_dir).values(), int((run_dir / "pid").read_text())]
    supervisor.kill()
    supervisor.communicate(timeout=15)
    wait_until(lambda: not any(alive(pid) for pid in pids))
    assert_free(port)


def test_a_port_held_by_a_part_is_really_held(run_dir, port):
    """Guards the tests above: while a part runs, its port is taken."""
    supervisor = launch(run_dir, port)
    with pytest.raises(OSError, match=f"port {port} on 127.0.0.1"), socket.socket():
        bind("127.0.0.1", port)
    supervisor.terminate()
    supervisor.communicate(timeout=15)
