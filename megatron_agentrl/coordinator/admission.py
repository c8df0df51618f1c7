"""Admission: how many groups may be under way so that no token gets older than the staleness bound.

Step V trains on one batch and may use tokens up to eta versions old, so while the engines serve version v the
batches of steps v .. v + eta may be filled. What is in flight and what is queued count as one number: a bound on
each alone lets the sum exceed it.
"""

from __future__ import annotations


def free_slots(version: int | None, eta: int, batch: int, accepted: int, running: int, total: int | None = None) -> int:
    """Groups that may be admitted now, >= 0: (version + eta + 1) * batch - (accepted + running).

    version   oldest proven version among the serving engines; None (no engine serves) admits nothing
    accepted  groups trained or waiting to be, since the start of the run; dropped and failed ones are not in it
    running   groups handed out and not finished
    total     groups the whole run will train; None when it has no end
    """
    if version is None:
        return 0
    allowed = (version + eta + 1) * batch
    if total is not None:
        allowed = min(allowed, total)
    return max(0, allowed - (accepted + running))
