"""The result of a held-out evaluation, from its groups. A failed trajectory is reported, never scored as 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_agentrl.coordinator.rows import Group, metric_means

#: Reward from which a trajectory counts as a success; rewards that are sums of parts may miss 1.0 by rounding.
SUCCESS = 1.0 - 1e-6


def summarize(groups: Sequence[Group]) -> dict[str, Any]:
    """`done`, `size`, `finished`, `failed`, `success` (share of the finished with full reward; None when none is),
    `metrics` (mean of each metric over the runs that report it, and of the reward), `tokens` (sampled, in all) and,
    with failures, a `message` with how many and the first of them."""
    receipts = [receipt for group in groups for receipt in group.receipts]
    rewards = [receipt.reward for receipt in receipts if receipt.reward is not None]
    reward = {"reward": sum(rewards) / len(rewards)} if rewards else {}
    failed = [sample for group in groups for sample in group.samples if sample.state == "failed"]
    message = ""
    if failed:
        last = failed[0].failures[-1]
        message = (
            f"{len(failed)} of {len(groups)} failed and are not in the means; first: {last.status}: {last.message}"
        )
    return {
        "done": all(group.final for group in groups),
        "size": len(groups),
        "finished": len(rewards),
        "failed": len(failed),
        "success": sum(reward >= SUCCESS for reward in rewards) / len(rewards) if rewards else None,
        "metrics": metric_means(receipts) | reward,
        "tokens": sum(sum(receipt.sampled.values()) for receipt in receipts),
        "message": message,
    }
