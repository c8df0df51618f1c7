"""Who is late and why: the sentence that stands in every wait that has not ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_agentrl.coordinator.rows import Group
from megatron_agentrl.coordinator.versions import Versions


def describe(
    what: str,
    groups: Iterable[Group],
    versions: Versions,
    seen: Mapping[str, float],
    now: float,
) -> str:
    """`what`, then the longest-waiting group of `groups`, then the engines.

    Example: `waiting for 3 of 16 groups: oldest t000012 asked 41 s ago of worker-0, 2 samples open; engine-0 proven
    version 4`. `seen` is worker -> time of its last call, on the clock of `now`.
    """
    in_flight = [group for group in groups if group.state == "in_flight"]
    return f"{what}: {_groups(in_flight, versions, seen, now)}; {versions.describe()}"


def _groups(groups: Sequence[Group], versions: Versions, seen: Mapping[str, float], now: float) -> str:
    if not groups:
        return f"no group is in flight, {_workers(seen, now)}"
    oldest = min(groups, key=lambda group: group.order)
    open_samples = [sample for sample in oldest.samples if not sample.final]
    asked = [sample for sample in open_samples if sample.state == "asked"]
    if asked:
        first = min(asked, key=lambda sample: sample.since)
        text = f"oldest {oldest.task_id} asked {now - first.since:.0f} s ago of {first.worker}"
    elif held := [sample.receipt for sample in open_samples if sample.state == "held" and sample.receipt is not None]:
        wanted = max(max(receipt.sampled, default=0) for receipt in held)
        text = f"oldest {oldest.task_id} is held until {held[0].engine} proves version {wanted}"
    else:
        text = f"oldest {oldest.task_id} is queued, {_workers(seen, now)}"
    return f"{text}, {len(open_samples)} sample{'s' if len(open_samples) != 1 else ''} open"


def _workers(seen: Mapping[str, float], now: float) -> str:
    if not seen:
        return "no worker has asked for work"
    worker, last = max(seen.items(), key=lambda item: item[1])
    return f"{worker} last asked for work {now - last:.0f} s ago"
