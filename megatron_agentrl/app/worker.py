"""Entry point of an agent worker: `python -m megatron_agentrl.app.worker --run DIR --index I`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from megatron_agentrl.agent.load import AgentLoadError, load_agent
from megatron_agentrl.launch.endpoints import Endpoints
from megatron_agentrl.recipe.load import load_resolved
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.rollout.worker import PeerLost, PeerRefused, Worker, WorkerSettings

log = logging.getLogger("worker")


def settings(recipe: Recipe, endpoints: Endpoints, index: int) -> WorkerSettings:
    """What the recipe lets the worker of this index do."""
    return WorkerSettings(
        name=f"worker-{index}",
        coordinator=endpoints.coordinator,
        gateway=endpoints.gateway,
        run_token=endpoints.token,
        concurrency=recipe.agent.concurrency,
        timeout=recipe.agent.timeout,
        max_turns=recipe.agent.max_turns,
    )


async def work(worker: Worker) -> None:
    """Works until the coordinator says stop, or until SIGTERM or SIGINT."""
    task = asyncio.create_task(worker.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("told to stop")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when told to stop, 1 when a peer is lost (naming it), 2 when the agent cannot be loaded."""
    parser = argparse.ArgumentParser(prog="megatron_agentrl.app.worker", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with recipe.yaml and endpoints.json")
    parser.add_argument("--index", type=int, default=0, help="index of the process in its role")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line per request otherwise
    recipe = load_resolved(arguments.run / "recipe.yaml")
    try:
        agent = load_agent(recipe.agent.cls)
    except AgentLoadError as error:
        log.error("%s", error)
        return 2
    worker = Worker(settings(recipe, Endpoints.read(arguments.run), arguments.index), agent)
    code = 0
    try:
        asyncio.run(work(worker))
    except* (PeerLost, PeerRefused) as lost:
        code = 1
        log.error("%s", "; ".join(map(str, lost.exceptions)))
    return code


if __name__ == "__main__":
    sys.exit(main())
