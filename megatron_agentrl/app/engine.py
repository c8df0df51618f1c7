"""Entry point of an engine process: vLLM's API server with our worker extension, in this very process.

    python -m megatron_agentrl.app.engine --run DIR --index I     replica I of a run
    python -m megatron_agentrl.app.engine --spec JSON             an EngineSpec, as rollout.engine.start passes it

The first form reads the run folder and becomes the second by exec, since preloaded libraries and OpenMP's thread count
must be in the environment before Python starts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from megatron_agentrl.rollout import engine, lifetime


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron_agentrl.app.engine", allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="run folder (recipe.yaml and endpoints.json)")
    source.add_argument("--spec", type=str, help="EngineSpec as JSON; the token stands in the environment")
    parser.add_argument("--index", type=int, default=0, help="replica, with --run")
    parser.add_argument(
        "--load-weights",
        action="store_true",
        help="with --run: serve the weights of model.path as version 0 (no trainer)",
    )
    args = parser.parse_args(argv)
    lifetime.die_with_parent()
    lifetime.tie_forked_children()
    if args.run is not None:
        _become_engine(args.run, args.index, args.load_weights)
    _serve(msgspec.json.decode(args.spec, type=engine.EngineSpec))


def _become_engine(run: Path, index: int, load_weights: bool) -> None:
    from megatron_agentrl.launch.endpoints import Endpoints, host_of, port_of
    from megatron_agentrl.recipe.load import load_resolved

    endpoints = Endpoints.read(run)
    url = endpoints.engines[index]
    recipe = load_resolved(run / "recipe.yaml")
    spec = engine.spec_from_recipe(recipe, index, host_of(url), port_of(url), load_folder_weights=load_weights)
    command = engine.command(spec)
    os.execve(command[0], command, engine.environment(spec, endpoints.token))


def _serve(spec: engine.EngineSpec) -> None:
    """Runs until the server is told to stop (SIGTERM) or fails."""
    if not spec.cuda:
        from megatron_agentrl.cpu import vllm as cpu_vllm

        cpu_vllm.register()
        cpu_vllm.import_model_class(spec.model)

    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(engine.arguments(spec))
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
