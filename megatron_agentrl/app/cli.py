"""The command line: `megatron-agentrl COMMAND recipe=NAME key=value ...`.

Exit codes: 0 well, 1 a part of the run failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_agentrl.recipe.errors import RecipeError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

COMMANDS = {
    "train": "warm start, asynchronous reinforcement, export; goes on from the newest checkpoint of the run",
    "sft": "the warm start alone, then the export (folder NAME-sft)",
    "eval": "held-out success of the weights in model.path (folder NAME-eval)",
    "export": "the newest checkpoint of a run as a Hugging Face folder",
    "check": "checks everything that train would, starts nothing",
    "inspect": "what one trainer rank holds, of any topology: its real megatron-core parameters (config.json is enough)",
    "recipe": "every key with type, default and documentation; with recipe=NAME, the resolved values",
}

EXAMPLES = """\
examples:
  megatron-agentrl train recipe=quickstart
  megatron-agentrl train recipe=quickstart run_name=seed-1 seed=1 train.steps=40
  megatron-agentrl eval recipe=quickstart model.path=runs/quickstart/export
  megatron-agentrl check recipe=my/recipe.yaml optimizer.lr=1e-5
  megatron-agentrl recipe

Values are typed by the recipe: unknown keys, +key, ~key and comma lists are refused.
exit codes: 0 well, 1 a part of the run failed, 2 bad input, 130 interrupted
"""


INSPECT_EXAMPLES = """\
examples:
  megatron-agentrl inspect recipe=quickstart
  megatron-agentrl inspect recipe=my/recipe.yaml rank=3 topology.pp=2 world=4
  megatron-agentrl inspect model.path=my/config-folder model.dtype=bf16 rank=3071 world=4096 \\
      topology.tp=8 topology.sequence_parallel=true topology.pp=4 topology.ep=64 topology.etp=1
  megatron-agentrl inspect recipe=quickstart --json | jq .totals

rank counts from 0 (the default); world=W is topology.world=W. Nothing is computed and nothing communicates: no
weights, tokenizer or other processes are needed.
exit codes: 0 well, 2 bad input
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # The agent's module is found from where the command was given, as it is by the worker processes.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if arguments.command == "inspect":
            from megatron_agentrl.app import inspect

            return inspect.run(arguments.overrides, recipes_dir(), as_json=arguments.json)
        return _run(arguments.command, arguments.overrides)
    except RecipeError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:  # before anything was started or after all has ended; in between the supervisor takes it
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, e.g. `| head`
        sys.stderr.close()
        return 1


def recipes_dir() -> Path:
    """`recipes/` here, else the one beside the package."""
    here = Path("recipes")
    return here if here.is_dir() else Path(__file__).resolve().parents[2] / "recipes"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-agentrl",
        description="Asynchronous reinforcement learning of language-model agents.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=INSPECT_EXAMPLES if name == "inspect" else EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == "inspect":
            command.add_argument("--json", action="store_true", help="one JSON object instead of the table")
        command.add_argument(
            "overrides", nargs="*", metavar="recipe=NAME key=value", help="a recipe and changes to its values"
        )
    return parser


def _run(command: str, overrides: list[str]) -> int:
    if command == "recipe":
        return _print_recipe(overrides)
    # Imported here, so that --help and the table answer at once.
    from megatron_agentrl.app import commands
    from megatron_agentrl.recipe.load import load

    recipe = load(overrides, recipes_dir())
    action = {
        "train": commands.train,
        "sft": commands.sft,
        "eval": commands.evaluate,
        "export": commands.export,
        "check": commands.check_only,
    }[command]
    return action(recipe)


def _print_recipe(overrides: list[str]) -> int:
    from megatron_agentrl.recipe.leaves import get
    from megatron_agentrl.recipe.load import documentation, load, shown

    recipe = load(overrides, recipes_dir()) if overrides else None
    for leaf in documentation():
        value = leaf.default if recipe is None else get(recipe, leaf.key)
        print(f"{leaf.key}={shown(value)}  ({leaf.type_name})\n    {leaf.doc}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
