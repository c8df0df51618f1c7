"""The micro-batch that one forward and backward pass of the trainer takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class MicroBatch:
    """Rows of token ids with aligned columns. B rows, T tokens; a column value [b, t] belongs to ids_BT[b, t].

    ids_BT     int64, right-padded
    lengths_B  int64, tokens of each row before its padding
    columns    name -> float32 [B, T]; "mask" is 1 where a token is trained, and 0 at t = 0
    """

    ids_BT: torch.Tensor
    lengths_B: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
