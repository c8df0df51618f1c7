"""Demonstrations as token rows: rendered by the model's own template, in the warm start's order.

The order is a pure function of (seed, step); rows are encoded when they are first asked for and kept.
"""

from __future__ import annotations

from pathlib import Path

from megatron_agentrl.chat.supervised import encode_demonstration
from megatron_agentrl.chat.template import ChatTemplate
from megatron_agentrl.chat.tokenizer import Tokenizer
from megatron_agentrl.data.demonstrations import batch_indices, read_demonstrations


class EncodedDemonstrations:
    def __init__(self, path: Path, model_folder: Path, seed: int, max_length: int) -> None:
        self._demonstrations = read_demonstrations(path)
        self._template = ChatTemplate.from_folder(model_folder)
        self._tokenizer = Tokenizer(model_folder)
        self._path, self._seed, self._max_length = path, seed, max_length
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def batch(self, step: int, size: int) -> list[tuple[list[int], list[int]]]:
        """(ids_T, mask_T) of the `size` demonstrations of `step` >= 0.

        Raises ValueError, naming the demonstration, where one is longer than the model takes.
        """
        return [self._row(i) for i in batch_indices(len(self._demonstrations), size, step, self._seed)]

    def _row(self, index: int) -> tuple[list[int], list[int]]:
        if index not in self._rows:
            chat = self._demonstrations[index]
            ids, mask = encode_demonstration(chat.messages, chat.tools, self._template, self._tokenizer)
            if len(ids) > self._max_length:
                raise ValueError(
                    f"{self._path}: demonstration {index + 1} has {len(ids)} tokens, model.max_length is "
                    f"{self._max_length}; shorten it or raise model.max_length"
                )
            self._rows[index] = ids, mask
        return self._rows[index]
