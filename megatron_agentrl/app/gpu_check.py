"""`make gpu-check`: what a GPU machine computes, against one process and against plain torch, as one table.

`python -m megatron_agentrl.app.gpu_check` plans the checks, starts the ranks they need (`app.gpu_check_rank`) and
prints a line for each. What this machine cannot run is skipped with the reason; a check that ran and disagreed, died
or was late makes the exit code 1. It proves numbers, not speed. No torch in this process.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_agentrl.launch.endpoints import free_ports
from megatron_agentrl.recipe.leaves import leaves
from megatron_agentrl.recipe.precision_rules import FP8_LIMITS, compute_capability, transformer_engine_missing
from megatron_agentrl.recipe.schema import Fp8Recipe
from megatron_agentrl.recipe.validate import gpu_count

EXAMPLES = """\
examples:
  python -m megatron_agentrl.app.gpu_check                      all checks that this machine's GPUs allow
  python -m megatron_agentrl.app.gpu_check --json check.json    the same, and the figures as JSON
  python -m megatron_agentrl.app.gpu_check --only 'parity/*'    some checks
  python -m megatron_agentrl.app.gpu_check --cpu                what a CPU can run of them, on gloo
  python -m megatron_agentrl.app.gpu_check --list               names and what each compares

exit codes: 0 nothing failed (skipped checks count as nothing), 1 a check failed, 2 bad input
"""


@dataclass(frozen=True)
class Check:
    """One check. `kind` names the function of `app.gpu_check_rank`, `settings` are overrides of the recipe."""

    name: str
    what: str
    kind: str
    world: int = 1
    settings: dict[str, str] = field(default_factory=dict)
    tolerance: float = 0.0
    needs_gpu: bool = False
    needs_te: bool = False
    fp8: Fp8Recipe | None = None


@dataclass
class Row:
    """What became of a check: passed, failed or skipped; `measured` is the largest relative gap."""

    name: str
    result: str
    measured: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    reason: str = ""


def _layout(text: str) -> dict[str, str]:
    return {f"topology.{key}": value for key, value in (part.split("=") for part in text.split())}


def checks() -> list[Check]:
    """Every check, in the order of the table. The first is the one process that the others are compared with."""
    layouts = [
        ("tp2", 2, "tp=2 sequence_parallel=true etp=1"),
        ("tp2-etp2", 2, "tp=2 sequence_parallel=true"),
        ("pp2", 2, "pp=2"),
        ("pp2-vpp2", 2, "pp=2 vpp=2"),
        ("cp2", 2, "cp=2"),
        ("ep2", 2, "ep=2"),
        ("ep2-allgather", 2, "ep=2 dispatcher=allgather"),
        ("dp2", 2, ""),
        ("dp2-overlap", 2, "overlap_grad_reduce=true overlap_param_gather=true"),
        ("tp2-ep2", 2, "tp=2 sequence_parallel=true ep=2 etp=1"),
        ("pp2-ep2", 4, "pp=2 ep=2"),
        ("tp2-pp2", 4, "tp=2 sequence_parallel=true pp=2 etp=1"),
        ("ep2-tp2-etp2", 4, "ep=2 tp=2 sequence_parallel=true etp=2"),
    ]
    half = {"model.dtype": "bf16"}
    return [
        Check("one-process", "four Adam steps in fp32: losses are finite and fall", "reference"),
        *(
            Check(f"parity/{name}", f"losses and norms of 4 Adam steps at {text or 'dp=2'} against one process", "steps",
                  world, _layout(text), 1e-5)
            for name, world, text in layouts
        ),
        Check("type/bf16", "losses of 4 steps in bf16 against fp32", "steps", 1, half, 2e-2),
        # Gradients that underflow move no weight, where Adam in fp32 moves each by about the learning rate.
        Check("type/fp16", "losses of 4 steps in fp16 against fp32", "steps", 1, {"model.dtype": "fp16"}, 5e-2),
        Check("recompute/full", "losses and norms with every layer recomputed", "steps", 1, {"memory.recompute": "full"}, 1e-5),
        Check("recompute/selective", "losses and norms with attention, MLP and experts recomputed", "steps", 1,
              {"memory.recompute": "selective", "memory.recompute_modules": "core_attn,mlp,moe"}, 1e-5),
        Check("offload", "losses with the optimizer on the host against bf16 on the device", "offload", 1,
              {**half, "memory.optimizer_offload": "1.0"}, 1e-3, needs_gpu=True, needs_te=True),
        Check("engine/spec", "the Transformer Engine layers against torch's: losses and checkpoint keys", "spec", 1, {}, 1e-3,
              needs_gpu=True, needs_te=True),
        *(
            Check(f"fp8/{recipe.value}", f"losses of 4 FP8 steps ({recipe.value}) against fp32", "steps", 1,
                  {**half, "precision.fp8": "hybrid" if recipe is not Fp8Recipe.mxfp8 else "e4m3",
                   "precision.fp8_recipe": recipe.value}
                  | ({"precision.bf16_modules": "mamba"} if recipe is Fp8Recipe.blockwise else {}),
                  5e-2, needs_gpu=True, needs_te=True, fp8=recipe)
            for recipe in Fp8Recipe
        ),
        Check("packing", "losses and norms of packed rows against padded ones", "steps", 1, {"train.packing": "true"}, 1e-5),
        Check("logprobs/values", "logprobs of the step's path against a float64 softmax", "logprobs", 1, {}, 1e-5),
        Check("logprobs/memory", "peak memory of 4k tokens x 131k columns, in fp32 copies of the logits", "logprob_memory", 1,
              {}, 4.0, needs_gpu=True),
    ]  # fmt: skip


def why_not(check: Check, *, gpus: int, on_cpu: bool, te_missing: str | None, capability: float | None) -> str | None:
    """Why this machine cannot run the check, or None."""
    known = leaves()
    for key in check.settings:
        if key not in known:
            return f"this version has no {key}"
    if not gpus and not on_cpu:
        return "no GPU (--cpu runs what a CPU can)"
    if check.needs_gpu and not gpus:
        return "no GPU"
    if gpus and check.world > gpus:
        return f"needs {check.world} GPUs, found {gpus}"
    if check.needs_te and te_missing:
        return te_missing
    if check.fp8 is not None:
        limits = FP8_LIMITS[check.fp8]
        if capability is None or not limits.lowest <= capability < limits.below:
            return f"needs compute capability {limits.lowest}, found {capability}"
    return None


def run(wanted: list[Check], folder: Path, *, on_cpu: bool, deadline: float) -> list[Row]:
    """Run the checks, one start of processes for each world size; a row for each, in the given order."""
    gpus = 0 if on_cpu else gpu_count()
    capability = compute_capability() if gpus else None
    machine = {"gpus": gpus, "on_cpu": on_cpu, "te_missing": transformer_engine_missing(), "capability": capability}
    rows: dict[str, Row] = {}
    able: list[Check] = []
    for check in wanted:
        reason = why_not(check, **machine)  # type: ignore[arg-type]
        if reason is None:
            able.append(check)
        else:
            rows[check.name] = Row(check.name, "skipped", reason=reason)
    for world in sorted({check.world for check in able}):
        left = [check for check in able if check.world == world]
        while left:
            done = _start(left, world, folder, on_cpu=on_cpu, deadline=deadline)
            rows |= {row.name: row for row in done}
            left = left[len(done) :]
    return [rows[check.name] for check in wanted]


def _start(left: list[Check], world: int, folder: Path, *, on_cpu: bool, deadline: float) -> list[Row]:
    """Start `world` ranks on these checks. Rows of those that came to an end; the one that killed the ranks is failed."""
    # One rendezvous for each check: a port is not free again the moment its process group ended.
    ports = free_ports("127.0.0.1", len(left))
    plan = [asdict(check) | {"port": port} for check, port in zip(left, ports, strict=True)]
    (folder / "plan.json").write_text(json.dumps(plan))
    print(f"{len(left)} checks on {world} process(es) ...", file=sys.stderr, flush=True)
    env = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    if on_cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    logs = [folder / f"rank-{world}-{rank}.log" for rank in range(world)]
    ranks = []
    t0 = time.monotonic()
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "megatron_agentrl.app.gpu_check_rank", str(folder)],
                        env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )  # fmt: skip
                )
        late = _wait(ranks, t0 + deadline * (1 + len(left)))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    done = []
    for check in left:
        result = folder / f"{check.name.replace('/', '-')}.json"
        if not result.is_file():
            break
        done.append(_judge(check, json.loads(result.read_text())))
    if len(done) < len(left):
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
        told = re.findall(r"\b\w*(?:Error|Exception|Gradient): .+", "\n".join(lines)) or lines or ["no output"]
        reason = f"no answer within {deadline:.0f} s a check" if late else told[-1][:200]
        done.append(Row(left[len(done)].name, "failed", reason=reason))
    return done


def _wait(ranks: list[subprocess.Popen[bytes]], until: float) -> bool:
    """Until all ranks ended or one failed. True where time ran out."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() not in (None, 0) for process in ranks):
            time.sleep(2.0)  # the others' own errors
            return False
        if time.monotonic() > until:
            return True
        time.sleep(0.2)
    return False


def _judge(check: Check, found: dict[str, Any]) -> Row:
    seconds = found["seconds"]
    if "refused" in found:
        return Row(check.name, "skipped", seconds=seconds, reason=f"refused: {found['refused']}")
    measured = found["measured"]
    if found.get("fault"):
        return Row(check.name, "failed", measured, check.tolerance, seconds, found["fault"])
    if not measured <= check.tolerance:  # also where it is not a number
        return Row(check.name, "failed", measured, check.tolerance, seconds, "beyond the tolerance")
    return Row(check.name, "passed", measured, check.tolerance, seconds)


def table(rows: list[Row]) -> str:
    """Aligned columns, and a line of totals."""
    head = ("check", "result", "measured", "allowed", "seconds", "reason")
    cells = [head] + [
        (
            row.name,
            row.result,
            "" if row.measured is None else f"{row.measured:.1e}",
            "" if row.tolerance is None else f"{row.tolerance:.0e}",
            "" if row.seconds is None else f"{row.seconds:.1f}",
            row.reason,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    counts = {result: sum(row.result == result for row in rows) for result in ("passed", "failed", "skipped")}
    return "\n".join([*lines, "", ", ".join(f"{count} {result}" for result, count in counts.items())])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Checks the trainer's numbers on this machine's GPUs.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON too")
    parser.add_argument("--only", metavar="PATTERN", help="checks whose name matches, e.g. 'parity/*'")
    parser.add_argument("--cpu", action="store_true", help="run what a CPU can, on gloo, also where there is a GPU")
    parser.add_argument("--list", action="store_true", help="print the checks and run nothing")
    parser.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS", help="for one check (default 300)")
    arguments = parser.parse_args(argv)
    first, *others = checks()
    wanted = [check for check in others if fnmatch.fnmatch(check.name, arguments.only or "*")]
    if wanted or fnmatch.fnmatch(first.name, arguments.only or "*"):
        wanted = [first, *wanted]  # the others are compared with it
    else:
        parser.error(f"--only {arguments.only}: no check has such a name; --list prints them")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: the folder does not exist; make it first")
    if arguments.list:
        width = max(len(check.name) for check in wanted)
        print("\n".join(f"{check.name.ljust(width)}  {check.what}" for check in wanted))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        rows = run(wanted, Path(folder), on_cpu=arguments.cpu, deadline=arguments.deadline)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.result == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
