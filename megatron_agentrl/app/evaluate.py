"""Entry point of the `eval` command's driver: one held-out evaluation of the weights in `model.path`.

Waits for the servers, puts the engines into service as version 0, asks the coordinator for the evaluation and writes
`eval.json`. There is no trainer: the engines have loaded the folder's own weights, so no canary has to prove them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx

from megatron_agentrl.launch.endpoints import Endpoints
from megatron_agentrl.observe.events import EventLog
from megatron_agentrl.recipe.load import load_resolved
from megatron_agentrl.rollout.weights_client import VllmEngine

RESULT_FILE = "eval.json"
_VERSION = 0
_POLL = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--index", type=int, default=0)
    args = parser.parse_args()
    recipe, endpoints = load_resolved(args.run / "recipe.yaml"), Endpoints.read(args.run)
    headers = {"Authorization": f"Bearer {endpoints.token}"}
    events = EventLog(args.run, "evaluate-0")
    with httpx.Client(headers=headers, timeout=30.0, trust_env=False) as http:
        with events.span("start"):
            urls = [endpoints.coordinator, endpoints.gateway, *endpoints.engines]
            wait_healthy(http, urls, max(recipe.deadlines.start, recipe.rollout.start_timeout))
            for index, url in enumerate(endpoints.engines):
                put_into_service(http, endpoints, f"engine-{index}", url)
        with events.span("eval"):
            result = evaluate(http, endpoints.coordinator, recipe.deadlines.eval)
    write_result(args.run, {"model": recipe.model.path, **result})
    events.close()


def wait_healthy(http: httpx.Client, urls: list[str], deadline: float) -> None:
    """Returns once every server answers GET /health; TimeoutError names the first that does not."""
    end = time.monotonic() + deadline
    for url in urls:
        while not _healthy(http, url):
            if time.monotonic() > end:
                raise TimeoutError(f"{url}/health did not answer within {deadline:g} s; see its log in logs/")
            time.sleep(_POLL)


def put_into_service(http: httpx.Client, endpoints: Endpoints, name: str, url: str) -> None:
    """Names the folder's weights, then the gateway, so that no work is handed out that no engine could serve."""
    engine = VllmEngine(name, url, endpoints.token)
    engine.name_version(_VERSION, time.monotonic() + 30.0)
    engine.close()
    body = {"url": url, "state": "serving", "version": _VERSION}
    http.put(f"{endpoints.gateway}/engines/{name}", json=body).raise_for_status()
    report = {"version": _VERSION, "engine": name, "state": "proven", "gap": None, "seconds": 0.0}
    http.post(f"{endpoints.coordinator}/versions", json=report).raise_for_status()


def evaluate(http: httpx.Client, coordinator: str, deadline: float) -> dict[str, Any]:
    """Asks for an evaluation and waits for its result."""
    end = time.monotonic() + deadline
    reply = http.post(f"{coordinator}/evals", json={"tag": "eval", "version": _VERSION}).raise_for_status().json()
    status: dict[str, Any] = {}
    while (left := end - time.monotonic()) > 0:
        answer = http.get(f"{coordinator}/evals/{reply['eval_id']}", params={"wait": min(5.0, left)})
        status = answer.raise_for_status().json()
        if status["done"]:
            return {
                name: status[name] for name in ("size", "finished", "failed", "message", "success", "metrics", "tokens")
            }
    raise TimeoutError(
        f"the evaluation did not finish within deadlines.eval = {deadline:g} s: {status.get('finished')} of "
        f"{status.get('size')} answers; raise deadlines.eval or lower eval.size"
    )


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    partial = run_dir / f"{RESULT_FILE}.{os.getpid()}.tmp"
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(run_dir / RESULT_FILE)


def _healthy(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/health", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False  # not up yet: the deadline judges


if __name__ == "__main__":
    main()
