"""The coordinator as the supervisor starts it: a process with a run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from megatron_agentrl.launch.endpoints import Endpoints, choose
from megatron_agentrl.recipe.load import save
from megatron_agentrl.recipe.schema import Recipe

WORK = {"worker": "worker-0", "max": 3}


@pytest.fixture
def run_dir(tmp_path):
    made = Recipe(run_name="test")
    made.model.path = "model"
    made.data.prompts = str(tmp_path / "train.jsonl")
    made.data.shuffle = False
    made.train.batch, made.algorithm.group_size = 2, 2
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}=?", "answer": i}) + "\n" for i in range(9))
    )
    save(made, tmp_path / "recipe.yaml")
    choose("127.0.0.1", replicas=1).write(tmp_path)
    return tmp_path


def launch(run_dir):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_agentrl.app.coordinator", "--run", str(run_dir), "--index", "0"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def client(run_dir) -> Iterator[httpx.Client]:
    """A client of a coordinator that answers /health within 20 s."""
    endpoints = Endpoints.read(run_dir)
    headers = {"Authorization": f"Bearer {endpoints.token}"}
    with httpx.Client(base_url=endpoints.coordinator, headers=headers) as http:
        deadline = time.monotonic() + 20
        while True:
            try:
                assert http.get("/health").json() == {"status": "ok"}
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, "no /health within 20 s"
                time.sleep(0.05)
        yield http


def test_a_killed_coordinator_goes_on_from_its_ledger_and_stops_cleanly(run_dir):
    process = launch(run_dir)
    try:
        with client(run_dir) as http:
            http.post("/versions", json={"engine": "engine-0", "version": 0, "state": "proven"}).raise_for_status()
            work = http.post("/work", json=WORK).json()
            assert [(g["task_id"], g["samples"], g["task"]["answer"]) for g in work["groups"]] == [
                ("t000000", [0, 1], "0"),
                ("t000001", [0], "1"),
            ]
        process.kill()
        process.wait(10)
        process = launch(run_dir)
        with client(run_dir) as http:
            assert http.get("/status").json()["groups"]["running"] == 2
            assert http.post("/resume", json={"step": 0}).json() == {"ok": True}
            http.post("/versions", json={"engine": "engine-0", "version": 0, "state": "proven"}).raise_for_status()
            again = http.post("/work", json=WORK).json()
            assert [(g["task_id"], g["samples"]) for g in again["groups"]] == [("t000000", [0, 1]), ("t000001", [0])]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_bad_prompts_end_the_process_with_the_line_at_fault(run_dir):
    (run_dir / "train.jsonl").write_text('{"prompt": "a"}\n{"answer": "b"}\n')
    process = launch(run_dir)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "train.jsonl:2: has neither prompt nor messages; give one of them" in errors


def test_an_account_that_cannot_be_vouched_for_ends_the_process(run_dir):
    process = launch(run_dir)
    try:
        with client(run_dir) as http:
            reply = http.post("/steps", json={"step": 4, "metrics": {}})
            assert reply.status_code == 500
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "step 4 was reported trained; 0 is the next to be trained" in errors
    finally:
        process.kill()
        process.wait()
