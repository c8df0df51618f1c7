"""What a finished run amounts to: `summary.json`, and the table and commands shown at the end.

Derived from metrics.jsonl and the event logs alone, so it can be made again at any time.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_agentrl.observe.events import read_events
from megatron_agentrl.observe.metrics import read_metrics
from megatron_agentrl.observe.overlap import Interval, length, overlap
from megatron_agentrl.recipe.schema import Dtype
from megatron_agentrl.recipe.validate import gpu_count

FILE_NAME = "summary.json"

#: Trainer phases in the order a run meets them.
PHASES = ("load", "warm_start", "wait", "train", "publish", "eval", "checkpoint", "export")

#: Name of the gateway's spans during which at least one request was in flight to an engine.
SAMPLING = "engine_busy"


def summarize(run_dir: str | Path, staleness_bound: int) -> dict[str, Any]:
    """The summary of a run. Values that were never measured are None (a run without held-out prompts has no success).

    success_*                   share of held-out prompts answered right, before and after reinforcement
    success_through_tool_after  share answered right through the tool
    logprob_gap_max             largest |trainer − engine| logprob at equal weights (the canaries of all publishes), in nats
    overlap                     share of the training time during which tokens were being sampled
    seconds                     by trainer phase, and `total` from the first start of a process to the last stop
    """
    lines = read_metrics(run_dir)
    train = [line for line in lines if line["kind"] == "train"]
    evals = [line for line in lines if line["kind"] == "eval"]
    before: dict[str, Any] = next((line for line in evals if line.get("tag") == "before"), {})
    after: dict[str, Any] = next((line for line in reversed(evals) if line.get("tag") == "after"), {})
    events = read_events(run_dir)
    return {
        "success_before": before.get("success"),
        "success_after": after.get("success"),
        "success_through_tool_after": after.get("agent/through_tool"),
        "steps": max((line["step"] for line in train), default=0),
        "staleness_bound": staleness_bound,
        "staleness_max": max((line["staleness_max"] for line in train), default=None),
        "logprob_gap_max": _gap(lines),
        "overlap": round(overlap(*training_and_sampling(events)), 4),
        "tokens_sampled": sum(line.get("tokens_sampled", 0) for line in train),
        "tokens_trained": sum(line.get("tokens_trained", 0) for line in train),
        "seconds": _seconds(events),
    }


def write_summary(run_dir: str | Path, summary: dict[str, Any]) -> None:
    """Writes summary.json in one step."""
    path = Path(run_dir) / FILE_NAME
    partial = path.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_summary(run_dir: str | Path) -> dict[str, Any]:
    return json.loads((Path(run_dir) / FILE_NAME).read_text(encoding="utf-8"))


def training_and_sampling(events: dict[str, list[dict[str, Any]]]) -> tuple[list[Interval], list[Interval]]:
    """Spans in which the first trainer rank trained, and spans in which the engines had requests of the gateway."""
    training = [_interval(e) for e in events.get("trainer-0", []) if e["name"] == "train" and "stop" in e]
    sampling = [
        _interval(event)
        for process, lines in events.items()
        if process.startswith("gateway-")
        for event in lines
        if event["name"] == SAMPLING and "stop" in event
    ]
    return training, sampling


def print_summary(run_dir: str | Path, summary: dict[str, Any]) -> None:
    """The table at the end of a run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(str(run_dir)), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("success before", _percent(summary["success_before"]))
    table.add_row("success after", _percent(summary["success_after"]))
    table.add_row("  of it through the tool", _percent(_share(summary)))
    table.add_row("steps", str(summary["steps"]))
    table.add_row("staleness, largest (bound)", f"{_number(summary['staleness_max'])} ({summary['staleness_bound']})")
    table.add_row("logprob gap, largest", _number(summary["logprob_gap_max"]))
    table.add_row("training overlapped by sampling", _percent(summary["overlap"]))
    table.add_row("tokens sampled / trained", f"{summary['tokens_sampled']:,} / {summary['tokens_trained']:,}")
    table.add_section()
    for phase, seconds in summary["seconds"].items():
        table.add_row(phase.replace("_", " "), f"{seconds:.1f} s")
    Console().print(table)


def serving_commands(run_dir: str | Path, messages: list[dict[str, Any]], max_tokens: int, dtype: Dtype) -> list[str]:
    """Two shell commands: one serves the exported model, one asks it `messages`."""
    name = Path(run_dir).name
    body = json.dumps({"model": name, "max_tokens": max_tokens, "messages": messages})
    kind = {Dtype.fp32: "float32", Dtype.bf16: "bfloat16", Dtype.fp16: "float16"}[dtype]
    # On a CPU vLLM otherwise claims most of the machine's memory for its cache, and fails where that is not free.
    cache = "" if gpu_count() else "VLLM_CPU_KVCACHE_SPACE=1 "
    return [
        f"{cache}{shlex.quote(_python())} -m vllm.entrypoints.openai.api_server --model {shlex.quote(str(Path(run_dir) / 'export'))} "
        f"--served-model-name {name} --dtype {kind} --enforce-eager --no-enable-prefix-caching --port 8000",
        f"curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
    ]


def _python() -> str:
    """This interpreter, as seen from here."""
    python = Path(sys.executable)
    return str(python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python)


def _interval(event: dict[str, Any]) -> Interval:
    return event["start"], event["stop"]


def _gap(lines: list[dict[str, Any]]) -> float | None:
    """Of the canaries of all publishes."""
    return max((line["gap"] for line in lines if line["kind"] == "publish" and line["gap"] is not None), default=None)


def _seconds(events: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    trainer = [event for event in events.get("trainer-0", []) if "stop" in event]
    seconds = {
        phase: round(length(_interval(event) for event in trainer if event["name"] == phase), 3)
        for phase in PHASES
        if any(event["name"] == phase for event in trainer)
    }
    total = sum(stop - start for start, stop in _starts(events.get("supervisor-0", [])))
    return {**seconds, "total": round(total, 3)}


def _starts(events: list[dict[str, Any]]) -> list[Interval]:
    """First and last moment of each start of the run; a killed supervisor leaves no `end`, its last event counts."""
    found: list[list[float]] = []
    roles: set[str] = set()  # of the present start: one of them started again begins the next
    for event in events:
        if event["name"] == "started":
            if not roles or event["role"] in roles:
                found.append([event["time"], event["time"]])
                roles = set()
            roles.add(event["role"])
        if found:
            found[-1][1] = event["time"]
        if event["name"] == "end":
            roles = set()
    return [(start, stop) for start, stop in found]


def _share(summary: dict[str, Any]) -> float | None:
    through, success = summary["success_through_tool_after"], summary["success_after"]
    return None if through is None or not success else through / success


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2g}" if isinstance(value, float) and not math.isnan(value) else str(value)
