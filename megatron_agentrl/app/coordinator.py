"""Entry point of the coordinator: `python -m megatron_agentrl.app.coordinator --run DIR --index 0`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from hashlib import blake2b
from pathlib import Path

from megatron_agentrl.app.serving import http_server
from megatron_agentrl.coordinator.app import CoordinatorApp
from megatron_agentrl.coordinator.ledger import Ledger
from megatron_agentrl.coordinator.rows import LedgerError
from megatron_agentrl.coordinator.service import Coordinator
from megatron_agentrl.data.prompts import PromptSets, fingerprint, load_prompts
from megatron_agentrl.data.stream import Stream
from megatron_agentrl.launch.endpoints import Endpoints
from megatron_agentrl.observe.events import EventLog
from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.load import load_resolved
from megatron_agentrl.recipe.schema import Recipe

log = logging.getLogger("coordinator")


def open_ledger(recipe: Recipe, prompts: PromptSets, path: Path) -> Ledger:
    """The run's ledger over the recipe's stream. What decides the stream's order is part of its identity."""
    stream = Stream(len(prompts.train), recipe.seed, recipe.data.shuffle, recipe.data.epochs)
    order = f"{fingerprint(prompts.train)}/{recipe.seed}/{recipe.data.shuffle}"
    return Ledger(path, stream, blake2b(order.encode(), digest_size=16).hexdigest())


def main(argv: list[str] | None = None) -> int:
    """Serves until it is told to stop (SIGTERM, SIGINT) or can no longer vouch for its state (exit code 1)."""
    parser = argparse.ArgumentParser(prog="megatron_agentrl.app.coordinator", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with recipe.yaml and endpoints.json")
    parser.add_argument("--index", type=int, default=0, help="index of the process in its role")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    run_dir: Path = arguments.run
    try:
        recipe = load_resolved(run_dir / "recipe.yaml")
        endpoints = Endpoints.read(run_dir)
        prompts = load_prompts(recipe)
        ledger = open_ledger(recipe, prompts, run_dir / "ledger.sqlite")
    except RecipeError as error:
        log.error("%s", error)
        return 2
    except LedgerError as error:
        log.error("%s", error)
        return 1

    fatal: list[str] = []

    def stop(reason: str) -> None:
        fatal.append(reason)
        server.should_exit = True

    events = EventLog(run_dir, f"coordinator-{arguments.index}")
    app = CoordinatorApp(
        Coordinator(recipe, ledger, prompts, record=events.point), endpoints.token, run_dir, on_fatal=stop
    )
    server = http_server(app.asgi, endpoints.coordinator)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    log.info(
        "%d training and %d held-out prompts, %d groups admitted before, listening on %s",
        len(prompts.train),
        len(prompts.held_out),
        ledger.admitted,
        endpoints.coordinator,
    )
    server.run()
    if fatal:
        log.error("the coordinator stops: %s", fatal[0])
        return 1
    ledger.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
