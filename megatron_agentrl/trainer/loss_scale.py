"""The dynamic loss scale of an fp16 run: one for all parts of the optimizer, changed once a step.

megatron-core 0.19.2 gives the dense and the experts' optimizer a scaler each. Only the first scales the loss, and
each changes by its own overflows: after one overflow in the experts alone their gradients are unscaled by half of
what the loss was scaled by, silently. Here the parts share one scaler that collects what they saw.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.grad_scaler import DynamicGradScaler


class LossScale(DynamicGradScaler):
    """A dynamic scaler whose `update` only notes an overflow; `settle` changes the scale for the whole step."""

    def __init__(self, initial: float, smallest: float, window: int) -> None:
        super().__init__(
            initial_scale=initial, min_scale=smallest, growth_factor=2.0, backoff_factor=0.5,
            growth_interval=window, hysteresis=1,
        )  # fmt: skip
        self._overflow = False

    def update(self, found_inf: bool) -> None:
        """Called by each part of the optimizer, possibly more than once a step."""
        self._overflow |= found_inf

    def settle(self) -> None:
        """Halve the scale if any part overflowed, or count the step towards the next doubling."""
        overflow, self._overflow = self._overflow, False
        super().update(overflow)

    @property
    def value(self) -> float:
        return float(self._scale)

    @property
    def at_minimum(self) -> bool:
        return self.value <= float(self.min_scale)


def share(parts: list[Any], config: Any) -> None:
    """Give all parts of an fp16 optimizer one scaler, by the OptimizerConfig it was built from."""
    scale = LossScale(config.initial_loss_scale, config.min_loss_scale, config.loss_scale_window)
    for part in parts:
        part.grad_scaler = scale


def of(parts: list[Any]) -> LossScale | None:
    """The scaler that the parts share; None where the run is not fp16."""
    scale = getattr(parts[0], "grad_scaler", None)
    return scale if isinstance(scale, LossScale) else None


def state(parts: list[Any]) -> dict[str, float] | None:
    """What a checkpoint keeps, as JSON; None where the run is not fp16."""
    scale = of(parts)
    return None if scale is None else {"scale": scale.value, "growth": scale._growth_tracker}


def restore(parts: list[Any], kept: dict[str, float] | None) -> None:
    """Go on from `state`; nothing where the checkpoint was of a run without a scale, or this is one."""
    scale = of(parts)
    if scale is not None and kept is not None:
        scale._scale.fill_(kept["scale"])
        scale._growth_tracker = int(kept["growth"])
