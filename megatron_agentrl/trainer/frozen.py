"""Policies that are never trained, on the trainer's own ranks: the reference of the KL term and the teacher.

Each scores the tokens of a step in one forward-only pass over all its micro-batches. One of the policy's own
architecture changes places with the policy's weights (`host_weights`); a teacher of another architecture or size is a
model of its own, cut by the same topology, whose weights come to the device for the pass. Between passes both lie in
the host's memory, every rank with its own shards, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_agentrl.layout.megatron import hf_tensors
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.trainer import checkpoint, model
from megatron_agentrl.trainer.architectures import architecture
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.data_parallel import settle
from megatron_agentrl.trainer.host_weights import HostWeights, to_host
from megatron_agentrl.trainer.optimizer import in_its_type
from megatron_agentrl.trainer.step import forward_logprobs
from megatron_agentrl.trainer.topology import Rank
from megatron_agentrl.trainer.weights_io import load_hf, read_config


class Frozen(Protocol):
    """A policy that scores tokens and never changes."""

    def logprobs(self, batches: list[MicroBatch], temperature: float) -> list[torch.Tensor]:
        """float32 [B, T] for each micro-batch, as `step.forward_logprobs`. Collective."""


def frozen_policies(
    recipe: Recipe, models: list[Any], hf_config: dict[str, Any], rank: Rank, checkpoints: Path, resume: bool
) -> dict[str, Frozen]:
    """The policies that the recipe's loss asks for, by the column of the micro-batch that their logprobs fill.

    Call it once, with the models as the reinforcement phase starts from them. Without a path the reference is these
    weights; they are written to `checkpoints/reference`, and with `resume` read from there: the models then hold the
    reference, and the caller loads the policy's own weights from its checkpoint. Collective.

    Raises:
        WeightsError: a folder that does not hold its model (see `load_hf`).
        IncompleteCheckpoint, OtherModel: `resume` without a whole reference.
        ValueError: a reference of another architecture, or a teacher that this topology cannot cut.
    """
    algorithm, found = recipe.algorithm, dict[str, Frozen]()
    if algorithm.kl_coef > 0:
        if algorithm.reference_path is not None:
            folder = Path(algorithm.reference_path)
            if not same_model(hf_config, read_config(folder)):
                raise ValueError(
                    f"algorithm.reference_path={folder}: its config.json is of another model than the policy's; give a "
                    "checkpoint of the policy's own architecture"
                )
            found["reference"] = _swapped(models, hf_config, folder, rank)
        else:
            found["reference"] = SamePlace(models, _starting_weights(models, checkpoints / "reference", resume))
    if algorithm.teacher_coef > 0:
        assert algorithm.teacher_path is not None  # the recipe's rules ask for it
        folder = Path(algorithm.teacher_path)
        config = read_config(folder)
        if same_model(hf_config, config):
            found["teacher"] = _swapped(models, hf_config, folder, rank)
        else:
            found["teacher"] = OwnPlace(config, recipe, folder, rank)
    return found


def same_model(ours: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two config.json dicts give the same computation and the same tensors."""
    if ours["model_type"] != other.get("model_type"):
        return False
    return architecture(ours) == architecture(other) and hf_tensors(ours) == hf_tensors(other)


def _swapped(models: list[Any], hf_config: dict[str, Any], folder: Path, rank: Rank) -> Frozen:
    return SamePlace(models, HostWeights.loaded(models, lambda: load_hf(models, hf_config, folder, rank)))


def _starting_weights(models: list[Any], folder: Path, resume: bool) -> HostWeights:
    settle(models)
    if resume:
        checkpoint.load_weights(folder, models)
    else:
        checkpoint.save_weights(folder, models)
    return HostWeights(models)


@dataclass
class SamePlace:
    """Other weights of the policy's architecture: they take the place of the present ones for the pass."""

    models: list[Any]
    weights: HostWeights

    def logprobs(self, batches: list[MicroBatch], temperature: float) -> list[torch.Tensor]:
        with self.weights.active(self.models):
            return forward_logprobs(self.models, batches, temperature)


class OwnPlace:
    """A model of its own on the policy's topology. Its weights are read from `folder`, kept on the host, and come to
    `rank.device` for the pass, beside the policy's. Making one is collective only in that every rank must.

    Raises:
        ValueError: the topology cannot cut the model.
        WeightsError: see `load_hf`.
    """

    def __init__(self, hf_config: dict[str, Any], recipe: Recipe, folder: Path, rank: Rank) -> None:
        recipe = deepcopy(recipe)
        recipe.model.mtp.train = False  # its prediction heads are not asked
        self._chunks = [in_its_type(chunk) for chunk in model.build(hf_config, recipe, rank)]
        load_hf(self._chunks, hf_config, folder, rank)
        self._device = torch.device(rank.device)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        on_host = self._device.type == "cpu"
        for chunk in self._chunks:
            for tensor in [*chunk.parameters(), *chunk.buffers()]:
                tensor.requires_grad_(False)
                self._tensors.append((tensor, tensor.data if on_host else to_host(tensor)))
        if not on_host:
            torch.cuda.synchronize()
        self._leave()

    def logprobs(self, batches: list[MicroBatch], temperature: float) -> list[torch.Tensor]:
        with self._here():
            return forward_logprobs(self._chunks, batches, temperature)

    @contextmanager
    def _here(self) -> Iterator[None]:
        """The weights on the device; what is there is dropped afterwards, since nothing changes it."""
        for tensor, host in self._tensors:
            tensor.data = host.to(self._device, non_blocking=True)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for tensor, host in self._tensors:
            tensor.data = host
