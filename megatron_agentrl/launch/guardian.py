"""A program, not a module to import: outlives a killed supervisor by a moment and ends the groups it left.

Reads `+PGID` and `-PGID` lines on standard input. The pipe closes when the supervisor is gone; the groups that are
then still listed are killed.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main()
