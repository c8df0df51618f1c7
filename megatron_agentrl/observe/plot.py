"""`reward.png`: reward of every step, held-out success with its sampling error, and the staleness below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_agentrl.observe.metrics import read_metrics

FILE_NAME = "reward.png"
_WINDOW = 9


def interval(success: float, size: int) -> tuple[float, float]:
    """95 % interval (Wilson) of a success rate measured on `size` answers; it has a width at 0 and 1 too."""
    z = 1.96
    centre = (success + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(success * (1 - success) / size + z * z / (4 * size * size))
    return max(0.0, centre - half), min(1.0, centre + half)


def smoothed(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Centred moving average; at the ends over what there is of the window."""
    half = window // 2
    cut = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in cut]


def _error_bar(line: dict[str, Any]) -> tuple[float, float]:
    """Lengths below and above the point."""
    low, high = interval(line["success"], line.get("finished", line["size"]))
    return max(0.0, line["success"] - low), max(0.0, high - line["success"])


def plot_reward(run_dir: str | Path, staleness_bound: int) -> Path | None:
    """Draws `reward.png` from metrics.jsonl; None where no step was trained."""
    train = read_metrics(run_dir, "train")
    evals = [line for line in read_metrics(run_dir, "eval") if line["success"] is not None]  # None: no prompt answered
    if not train:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [line["step"] for line in train]
    rewards = [line["reward"] for line in train]
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.4), height_ratios=[3, 1], layout="constrained", dpi=150
    )
    top.plot(steps, rewards, color="#9db8d9", linewidth=1, marker=".", markersize=3, label="training reward, each step")
    top.plot(steps, smoothed(rewards), color="#1f4e8c", linewidth=2, label=f"the same, mean of {_WINDOW} steps")
    if evals:
        top.errorbar(
            [line["step"] for line in evals],
            [line["success"] for line in evals],
            yerr=list(zip(*(_error_bar(line) for line in evals), strict=True)),
            color="#c8442d",
            marker="o",
            markersize=5,
            linestyle="none",
            elinewidth=1.3,
            capsize=3,
            zorder=5,
            label="held-out success (95 % interval)",
        )
    if min(rewards) >= 0 and max(rewards) <= 1:
        top.set_ylim(-0.03, 1.03)
    top.set_ylabel("reward, success")
    top.set_title(Path(run_dir).name, loc="left", fontweight="bold")
    top.legend(loc="lower right", frameon=False)
    mean = [line["staleness_mean"] for line in train]
    largest = [line["staleness_max"] for line in train]
    bottom.plot(steps, largest, color="#b0b0b0", linewidth=1, drawstyle="steps-mid", label="largest")
    bottom.plot(steps, mean, color="#3a7d44", linewidth=1.6, label="mean")
    bottom.axhline(staleness_bound, color="#c8442d", linewidth=1, linestyle="--", label="bound")
    bottom.set_ylim(-0.05 * (staleness_bound + 1), staleness_bound + 0.5)
    bottom.set_ylabel("staleness")
    bottom.set_xlabel("step (policy version)")
    bottom.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False, fontsize="small")
    bottom.yaxis.get_major_locator().set_params(integer=True)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path = Path(run_dir) / FILE_NAME
    figure.savefig(path)
    plt.close(figure)
    return path
