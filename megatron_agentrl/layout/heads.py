"""Multi-token-prediction heads: how megatron-core names what a checkpoint holds beyond the model's own layers.

A head predicts one token further ahead: it joins the last hidden state with the embedding of the next token
(`enorm`, `hnorm`, `eh_proj`), runs its own layers and ends in a norm; embedding and output layer are the model's.
Which tensors a model type calls so stands in its table (`nemotron_h.heads`, `deepseek_v3.heads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_agentrl.layout.entries import Entry, Source, replicated, rows


@dataclass(frozen=True, slots=True)
class Head:
    """Entries of one head. `own` have names relative to `mtp.layers.<depth>.`; `layers[j]` to
    `mtp.layers.<depth>.mtp_model_layer.layers.<j>.`."""

    own: tuple[Entry, ...]
    layers: tuple[tuple[Entry, ...], ...]

    def prefixed(self, depth: int) -> list[tuple[str, Entry]]:
        """(prefix of the parameter's name, entry) of everything in the head."""
        at = f"mtp.layers.{depth}."
        inner = [(f"{at}mtp_model_layer.layers.{j}.", entry) for j, layer in enumerate(self.layers) for entry in layer]
        return [(at, entry) for entry in self.own[:-1]] + inner + [(at, self.own[-1])]


def head_of(at: str, final_norm: Source, layers: Sequence[Sequence[Entry]], hidden: int) -> Head:
    """A head whose joining tensors are named `{at}enorm.weight` and so on; the final norm's name differs by model."""
    own = (
        replicated("enorm.weight", Source(at + "enorm.weight", (hidden,))),
        replicated("hnorm.weight", Source(at + "hnorm.weight", (hidden,))),
        rows("eh_proj.weight", Source(at + "eh_proj.weight", (hidden, 2 * hidden))),
        replicated("final_layernorm.weight", final_norm),
    )
    return Head(own, tuple(tuple(layer) for layer in layers))
