"""Tiny models, made once a session; each test converts into folders of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_agentrl.convert.tiny import make_tiny
from megatron_agentrl.cpu import megatron

megatron.install()  # before anything imports megatron-core
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "trainer")]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny model by the name of its architecture, in bfloat16 where it may be."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            import torch

            made[name] = tmp_path_factory.mktemp("tiny") / name
            make_tiny(name, made[name], seed=3, dtype=torch.bfloat16)
        return made[name]

    return folder


@pytest.fixture
def copy_of(tiny, tmp_path):
    """A copy of a tiny model's folder that a test may break."""
    import shutil

    def copied(name: str) -> Path:
        return Path(shutil.copytree(tiny(name), tmp_path / name))

    return copied
