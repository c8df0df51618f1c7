"""Entry point of the gateway: `python -m megatron_agentrl.app.gateway --run DIR --index 0`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from megatron_agentrl.app.serving import http_server
from megatron_agentrl.chat.parse import ReplyParser
from megatron_agentrl.chat.sampling import SamplingContract
from megatron_agentrl.chat.template import ChatTemplate
from megatron_agentrl.chat.tokenizer import Tokenizer
from megatron_agentrl.gateway.app import Gateway
from megatron_agentrl.gateway.busy import Interval
from megatron_agentrl.gateway.session import Policy
from megatron_agentrl.launch.endpoints import Endpoints
from megatron_agentrl.observe.events import EventLog
from megatron_agentrl.recipe.load import load_resolved
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.rollout.pool import EnginePool
from megatron_agentrl.trajectory.spool import SpoolWriter

log = logging.getLogger("gateway")


def sampling_contract(recipe: Recipe) -> SamplingContract:
    """The contract of the run's training sessions."""
    return SamplingContract(
        temperature=recipe.sampling.temperature,
        max_tokens=recipe.sampling.max_tokens,
        max_response_tokens=recipe.sampling.max_response_tokens,
        context_length=recipe.model.max_length,
    )


def load_policy(model_folder: str) -> Policy:
    """Tokenizer, chat template and reply parser of a model folder."""
    tokenizer = Tokenizer(model_folder)
    return Policy(tokenizer, ChatTemplate.from_folder(model_folder), ReplyParser(tokenizer))


async def serve(run_dir: Path, index: int) -> None:
    """Serves until the process is told to stop."""
    recipe = load_resolved(run_dir / "recipe.yaml")
    endpoints = Endpoints.read(run_dir)
    name = f"gateway-{index}"
    events = EventLog(run_dir, name)
    spool = SpoolWriter(run_dir, name)
    pool = EnginePool(endpoints.token, timeout=recipe.rollout.request_timeout, wait=recipe.rollout.request_timeout)

    def take_busy() -> list[Interval]:
        return [interval for intervals in pool.take_busy().values() for interval in intervals]

    def engine_stats() -> dict[str, Any]:
        return {
            engine.name: {
                "state": engine.state,
                "version": engine.version,
                "in_flight": engine.in_flight,
                "requests": engine.requests,
                "tokens": engine.tokens,
            }
            for engine in pool.engines.values()
        }

    gateway = Gateway(
        load_policy(recipe.model.path),
        sampling_contract(recipe),
        pool,
        spool.append,
        endpoints.token,
        endpoints.gateway,
        # No trajectory outlives the agent's time, so none of its turns does.
        turn_timeout=recipe.agent.timeout,
        idle_timeout=2 * recipe.agent.timeout + 60,
        record=events.record,
        take_busy=take_busy,
        update_engine=pool.update,
        engine_stats=engine_stats,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    log.info("policy %s, listening on %s", recipe.model.path, endpoints.gateway)
    await http_server(gateway.asgi, endpoints.gateway).serve()
    await pool.close()
    spool.close()
    events.close()


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 after SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="megatron_agentrl.app.gateway", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with recipe.yaml and endpoints.json")
    parser.add_argument("--index", type=int, default=0, help="index of the process in its role")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(serve(arguments.run, arguments.index))
    return 0


if __name__ == "__main__":
    sys.exit(main())
