"""The processes of a run as the supervisor starts them: command, environment, health, deadline."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_agentrl.launch.endpoints import Endpoints
from megatron_agentrl.launch.supervisor import Role
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.recipe.validate import gpu_names


def roles(recipe: Recipe, run_dir: Path, endpoints: Endpoints, mode: str) -> list[Role]:
    """Processes for `mode`: all of them (train), trainer ranks only (sft, export), all but those (eval).

    Each is given the run folder as an absolute path: they name files in it to one another.
    """
    run_dir = run_dir.resolve()
    trainers = [_trainer(recipe, run_dir, rank, mode) for rank in range(recipe.topology.world)]
    if mode in ("sft", "export"):
        return trainers
    serving = [
        _role(recipe, run_dir, "coordinator", 0, health_url=endpoints.coordinator),
        *(
            _role(
                recipe,
                run_dir,
                "engine",
                index,
                health_url=url,
                start_deadline=recipe.rollout.start_timeout,
                threads=recipe.rollout.threads,
                gpus=range(
                    _first_engine_gpu(recipe, mode) + index * recipe.rollout.tp,
                    _first_engine_gpu(recipe, mode) + (index + 1) * recipe.rollout.tp,
                ),
                extra=["--load-weights"] if mode == "eval" else [],
            )
            for index, url in enumerate(endpoints.engines)
        ),
        _role(recipe, run_dir, "gateway", 0, health_url=endpoints.gateway),
        *(_role(recipe, run_dir, "worker", index) for index in range(recipe.agent.workers)),
    ]
    if mode == "eval":
        return [*serving, _role(recipe, run_dir, "evaluate", 0, decides=True)]
    return [*serving, *trainers]


def _trainer(recipe: Recipe, run_dir: Path, rank: int, mode: str) -> Role:
    return _role(
        recipe,
        run_dir,
        "trainer",
        rank,
        decides=True,
        threads=recipe.topology.threads,
        gpus=range(recipe.topology.world),
        extra=["--mode", mode],
    )


def _first_engine_gpu(recipe: Recipe, mode: str) -> int:
    return 0 if mode == "eval" else recipe.topology.world


def _role(
    recipe: Recipe,
    run_dir: Path,
    name: str,
    index: int,
    *,
    health_url: str | None = None,
    start_deadline: float | None = None,
    decides: bool = False,
    threads: int = 1,
    gpus: range = range(0),
    extra: list[str] | None = None,
) -> Role:
    command = [sys.executable, "-m", f"megatron_agentrl.app.{name}", "--run", str(run_dir), "--index", str(index)]
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads), **_no_proxy(recipe.ports.host)}
    if recipe.ports.host == "127.0.0.1":
        # A machine whose own name does not resolve would otherwise leave gloo without an address.
        env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if devices := gpu_names():
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[gpu] for gpu in gpus)
    return Role(
        name=f"{name}-{index}",
        argv=[*command, *(extra or [])],
        env=env,
        health_url=health_url,
        start_deadline=start_deadline or recipe.deadlines.start,
        decides=decides,
    )


def _no_proxy(host: str) -> dict[str, str]:
    """The run's own traffic never goes through a proxy. Where both names are set, clients look at the lower-case one."""
    given = ",".join(os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")).split(",")
    hosts = ",".join(dict.fromkeys([*filter(None, given), "127.0.0.1", "localhost", host]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}
