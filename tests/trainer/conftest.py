"""megatron-core must find the CPU shim in place before it is first imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_agentrl.cpu import megatron

megatron.install()
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def rank():
    """One process, as a world of its own, for one test module."""
    from megatron_agentrl.recipe.schema import Topology
    from megatron_agentrl.trainer import topology

    yield topology.init(Topology(), seed=1, timeout=60)
    topology.shutdown()
