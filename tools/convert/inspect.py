"""What a checkpoint holds. `python tools/convert/inspect.py --help`."""

import os
import sys

# Python puts this folder first on the path, where inspect.py would hide the standard library's: the repository instead.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120

from megatron_agentrl.convert.cli import inspect  # noqa: E402

if __name__ == "__main__":
    sys.exit(inspect())
