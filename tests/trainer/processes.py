"""Starts a test's trainer processes and ends them all: shared by every test that needs more than one.

The starting process holds the rendezvous stores, on ports that the kernel gave it, for as long as they run: no port is
chosen first and bound later, so that suites side by side cannot take each other's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

HERE = Path(__file__).parent
DEADLINE = 280.0  # seconds; below the 300 that pytest gives a test


def run(script: str, world: int, folder: Path, *args: str, meetings: int = 1, deadline: float = DEADLINE) -> None:
    """Run tests/trainer/SCRIPT with `args` as ranks 0 to world - 1. Their logs stand in `folder`.

    The first that fails ends the others, and its log is the error's text. `meetings`: how often they make and destroy
    a process group; inside, `meeting(n)` goes before the n-th.
    """
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(meetings)]
    env = dict(
        os.environ,
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(stores[0].port),
        MASTER_PORTS=" ".join(str(store.port) for store in stores),
        TORCHELASTIC_USE_AGENT_STORE="True",  # as torchrun says that it holds the store
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(map(str, [HERE.parents[1], HERE, HERE.parent, HERE.parent / "layout"])),
    )
    stem = f"{Path(script).stem}-{world}-{time.monotonic_ns()}"
    logs = [(folder / f"{stem}-{rank}.log").open("w+") for rank in range(world)]
    command = [sys.executable, "-W", "ignore", str(HERE / script), *args]
    started = [
        subprocess.Popen(command, env=dict(env, RANK=str(rank)), stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + deadline
    try:
        while any(process.poll() is None for process in started) and not any(p.returncode for p in started):
            assert time.monotonic() < end, f"{script} did not finish within {deadline:.0f} s"
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(started) if process.returncode]
    finally:
        for process in started:
            process.kill()
            process.wait()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
    assert not failed, (
        f"rank {failed[0]} of {script} ended with {started[failed[0]].returncode}:\n{texts[failed[0]][-4000:]}"
    )


def meeting(number: int) -> None:
    """In a process of `run`: the next process group is the `number`-th of this start (from 0), on every rank."""
    os.environ["MASTER_PORT"] = os.environ["MASTER_PORTS"].split()[number]
