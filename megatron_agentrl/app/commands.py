"""What each command does once its recipe is known. The command line itself is `app.cli`."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

from megatron_agentrl.app.checks import check
from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.schema import Recipe

EXIT_OK = 0
EXIT_FAILED = 1


def run_dir_of(recipe: Recipe, mode: str) -> Path:
    """`train` and `export` share runs/NAME; a warm start alone and an evaluation have folders of their own."""
    suffix = {"train": "", "export": "", "sft": "-sft", "eval": "-eval"}[mode]
    return Path(recipe.run_root) / f"{recipe.run_name}{suffix}"


def train(recipe: Recipe) -> int:
    """Warm start, reinforcement, export; then the summary."""
    from megatron_agentrl.launch.run_folder import locked, prepare

    run_dir = run_dir_of(recipe, "train")
    check(recipe, "train")
    with locked(run_dir):
        folder = prepare(recipe, run_dir)
        _say(folder.notes)
        if not folder.finished:
            code = _supervise(recipe, run_dir, "train")
            if code != EXIT_OK:
                return code
            _summarize(recipe, run_dir)
        _show_summary(recipe, run_dir)
    return EXIT_OK


def sft(recipe: Recipe) -> int:
    """The warm start alone, then the export."""
    from megatron_agentrl.launch.run_folder import locked, prepare

    run_dir = run_dir_of(recipe, "sft")
    check(recipe, "sft")
    with locked(run_dir):
        _say(prepare(recipe, run_dir, fresh=True).notes)
        code = _supervise(recipe, run_dir, "sft")
    if code == EXIT_OK:
        print(f"exported to {run_dir / 'export'}")
    return code


def evaluate(recipe: Recipe) -> int:
    """Held-out success of the weights in `model.path`."""
    from megatron_agentrl.app.evaluate import RESULT_FILE
    from megatron_agentrl.launch.run_folder import locked, prepare

    run_dir = run_dir_of(recipe, "eval")
    check(recipe, "eval")
    with locked(run_dir):
        nothing_to_train = copy.deepcopy(recipe)
        nothing_to_train.train.steps = 0  # the coordinator then admits held-out prompts only
        _say(prepare(nothing_to_train, run_dir, fresh=True).notes)
        code = _supervise(nothing_to_train, run_dir, "eval")
        if code != EXIT_OK:
            return code
        result = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
    if result["failed"]:
        print(f"{result['failed']} of {result['size']} prompts failed and are in no mean: {result['message']}")
    if result["success"] is None:
        print("no held-out prompt was answered; see the logs in the run folder", file=sys.stderr)
        return EXIT_FAILED
    print(f"success {result['success']:.3f} on {result['finished']} held-out prompts")
    for name, value in sorted(result["metrics"].items()):
        print(f"  {name} {value:.3f}")
    print(f"written to {run_dir / RESULT_FILE}")
    return EXIT_OK


def export(recipe: Recipe) -> int:
    """The newest checkpoint of the run as a Hugging Face folder."""
    from megatron_agentrl.launch.run_folder import RECIPE_FILE, locked, newest_checkpoint
    from megatron_agentrl.recipe.load import changed, load_resolved

    run_dir = run_dir_of(recipe, "export")
    if newest_checkpoint(run_dir) is None:
        raise RecipeError(
            f"{run_dir}: holds no checkpoint to export; train first, or set run_name to a run that has one"
        )
    others = [str(change) for change in changed(load_resolved(run_dir / RECIPE_FILE), recipe) if not change.resumable]
    if others:
        raise RecipeError(
            f"{run_dir}: was trained with another recipe ({'; '.join(others[:3])}); to export it as it is, give "
            f"recipe={run_dir / RECIPE_FILE}"
        )
    check(recipe, "export")
    with locked(run_dir):
        code = _supervise(recipe, run_dir, "export")
    if code == EXIT_OK:
        print(f"step {newest_checkpoint(run_dir)} exported to {run_dir / 'export'}")
    return code


def check_only(recipe: Recipe) -> int:
    """Everything `train` checks, and nothing else."""
    for line in check(recipe, "train"):
        print(line)
    print("ok")
    return EXIT_OK


def _supervise(recipe: Recipe, run_dir: Path, mode: str) -> int:
    from megatron_agentrl.app.roles import roles
    from megatron_agentrl.launch.endpoints import choose
    from megatron_agentrl.launch.supervisor import run
    from megatron_agentrl.observe.live import LiveView

    ports = recipe.ports
    endpoints = choose(ports.host, recipe.rollout.replicas, ports.coordinator, ports.gateway, ports.engine)
    endpoints.write(run_dir)
    view = LiveView(
        run_dir,
        steps=recipe.train.steps,
        warm_start_steps=recipe.warm_start.steps,
        doing={"eval": "evaluating", "export": "exporting"}.get(mode, "starting"),
        live=recipe.observe.live,
    )
    with view:
        return run(recipe, roles(recipe, run_dir, endpoints, mode), run_dir, on_tick=view.tick)


def _summarize(recipe: Recipe, run_dir: Path) -> None:
    from megatron_agentrl.observe.plot import plot_reward
    from megatron_agentrl.observe.summary import summarize, write_summary

    plot_reward(run_dir, recipe.staleness.eta)
    write_summary(run_dir, summarize(run_dir, recipe.staleness.eta))


def _show_summary(recipe: Recipe, run_dir: Path) -> None:
    from megatron_agentrl.data.prompts import load_prompts
    from megatron_agentrl.observe.summary import print_summary, read_summary, serving_commands

    print_summary(run_dir, read_summary(run_dir))
    if not (run_dir / "export" / "config.json").is_file():
        return
    prompts = load_prompts(recipe)
    messages = (prompts.held_out or prompts.train)[0].messages
    print("Serve the trained model, then ask it something:")
    for command in serving_commands(run_dir, messages, recipe.sampling.max_tokens, recipe.rollout.dtype):
        print(f"  {command}")


def _say(notes: list[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)
