"""The sampling contract: what engine and trainer agree a sampled token's probability means.

The trainer recomputes every sampled token's log-probability from full logits divided by the
temperature. Whatever else shapes sampling (top-p, penalties, biases, grammars) would make its numbers
mean something else, so a request that asks for it is refused here rather than trained wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class SamplingRefused(ValueError):
    """A request asks for sampling that this run cannot honour. `parameter` names what was asked."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True)
class SamplingContract:
    """How one session samples.

    temperature          logits are divided by it, in the engine and in the trainer; 0 is greedy
    max_tokens           longest policy turn, in tokens
    max_response_tokens  policy tokens of the whole trajectory
    context_length       longest sequence, in tokens, that engine and trainer accept
    training             whether the tokens may be trained on
    """

    temperature: float
    max_tokens: int
    max_response_tokens: int
    context_length: int
    training: bool = True

    def __post_init__(self) -> None:
        if self.temperature < 0 or (self.training and self.temperature == 0):
            raise SamplingRefused(
                "temperature",
                f"temperature {self.temperature:g}: expected above 0 (greedy tokens have no behaviour probability to train on)",
            )
        for name in ("max_tokens", "max_response_tokens", "context_length"):
            if getattr(self, name) < 1:
                raise SamplingRefused(name, f"{name} {getattr(self, name)}: expected at least 1")


@dataclass(frozen=True)
class TurnSampling:
    """What one request asks of the engine."""

    temperature: float
    max_tokens: int


#: Request fields that would change the distribution or the wire, and the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([],),
    "seed": (),
    "n": (1,),
    "stream": (False,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "store": (False,),
}
#: Fields that this endpoint reads, or that carry no meaning for sampling.
_READ = frozenset(
    {"messages", "model", "tools", "temperature", "max_tokens", "max_completion_tokens", "chat_template_kwargs", "user", "metadata"}
)
_WHY = {
    "n": "one reply per request; ask again for another sample (each becomes a branch of the trajectory)",
    "stream": "replies are sent whole",
    "stop": "a turn ends at the model's own stop tokens",
    "seed": "sampling is not seeded per request",
    "logprobs": "the gateway records them itself",
}


def turn_sampling(request: dict[str, Any], contract: SamplingContract) -> TurnSampling:
    """The sampling of one chat request under `contract`. Raises SamplingRefused, naming the parameter."""
    for name, value in request.items():
        if name in _READ or value is None:
            continue
        if name not in _NEUTRAL:
            raise SamplingRefused(name, f"{name} is not known to this endpoint; leave it out")
        if value not in _NEUTRAL[name]:
            why = _WHY.get(name, "the trainer could not reproduce the tokens' probabilities")
            raise SamplingRefused(name, f"{name}={value!r} is not supported: {why}")
    temperature = _number(request, "temperature", contract.temperature)
    if contract.training and temperature != contract.temperature:
        raise SamplingRefused(
            "temperature",
            f"temperature {temperature:g} asked, but this run trains at {contract.temperature:g}; "
            "leave it out or set sampling.temperature in the recipe",
        )
    if temperature < 0:
        raise SamplingRefused("temperature", f"temperature {temperature:g}: expected at least 0")
    asked = contract.max_tokens
    for name in ("max_completion_tokens", "max_tokens"):
        limit = _number(request, name, asked)
        if limit != int(limit) or limit < 1:
            raise SamplingRefused(name, f"{name} {limit:g}: expected a whole number of at least 1")
        asked = min(asked, int(limit))
    return TurnSampling(temperature=float(temperature), max_tokens=asked)


def _number(request: dict[str, Any], name: str, default: float) -> float:
    value = request.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SamplingRefused(name, f"{name} {value!r}: expected a number")
    return value
