"""One optimizer step, and forward passes for logprobs, through megatron-core's schedule.

Normalisation is global: the gradient is that of (sum of losses over the global batch) / `tokens`, whatever
the micro-batches, data-parallel ranks or experts' ranks. Every rank must enter each call, with the same
number of micro-batches: experts exchange tokens in every layer. A rank without rows passes empty
micro-batches. The loss itself is the caller's; see `LossFunction`.

Shapes: B rows, T tokens, V columns of the vocabulary held here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_agentrl.trainer import loss_scale
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.logprobs import token_logprobs, token_logprobs_and_entropy
from megatron_agentrl.trainer.micro_batches import conform
from megatron_agentrl.trainer.mtp import head_count, heads_grad_norm, heads_loss, predictions
from megatron_agentrl.trainer.optimizer import apply_prepared, parts, routers, set_learning_rate
from megatron_agentrl.trainer.precision import token_multiple
from megatron_agentrl.trainer.sequence_layout import SequenceLayout, lay_out
from megatron_agentrl.trainer.topology import own_device

#: (logprobs_BT, micro-batch) -> (loss summed over trained tokens, metrics summed over them).
#: logprobs_BT[b, t] is the logprob of ids_BT[b, t]; column 0 is 0 and must be masked.
LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class NonFiniteGradient(RuntimeError):
    """The gradient norm of a step is not a finite number; the step was not applied."""


@dataclass
class StepResult:
    """What a step did. `loss` is sum / tokens over the global batch; `metrics` are global sums (maxima under `max/`).

    `loss_scale` is what the applied gradients were scaled by (1 but in fp16), `overflows` how often the batch was
    repeated at a lower scale before that.
    """

    loss: float
    grad_norm: float
    tokens: float
    lr: float
    applied: bool
    metrics: dict[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0
    overflows: int = 0


def is_empty(batch: MicroBatch) -> bool:
    """A micro-batch of weight 0: this rank has no rows for it but must take part."""
    return _shapeless(batch) or int(batch.lengths_B.max()) < 2


def _shapeless(batch: MicroBatch) -> bool:
    return batch.ids_BT.shape[0] == 0 or batch.ids_BT.shape[1] < 2


def _runnable(batch: MicroBatch) -> MicroBatch:
    """The micro-batch, or one row of two padding tokens where there is nothing to run."""
    if not _shapeless(batch):
        return batch
    return MicroBatch(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), {})


def _to(batch: MicroBatch, device: torch.device) -> MicroBatch:
    columns = {name: column.to(device, non_blocking=True) for name, column in batch.columns.items()}
    return MicroBatch(batch.ids_BT.to(device), batch.lengths_B.to(device), columns)


def _lay_out(
    model: torch.nn.Module, batch: MicroBatch, device: torch.device, packing: bool | None = None, ahead: int = 0
) -> SequenceLayout:
    """Where this rank's model, or its head that looks `ahead`, finds the tokens of a micro-batch that lies on the CPU."""
    config = get_model_config(model)
    return lay_out(
        batch,
        packing=get_attr_wrapped_model(model, "packing") if packing is None else packing,
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=config.sequence_parallel,
        align=token_multiple(config),
        cp=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        ahead=ahead,
    ).to(device)


def _forward(model: torch.nn.Module, layout: SequenceLayout, ahead: Sequence[SequenceLayout] = ()) -> torch.Tensor:
    """Run the model on this rank's positions: logits [R, L, V] on the last stage. Given the layouts of its prediction
    heads, the model runs them too, and what they give waits in `mtp.predictions`."""
    padding = layout.padding_RL  # True is what must not count for the router's bias
    if get_model_config(model).sequence_parallel:  # the sequence is cut over the tensor-parallel ranks
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        padding = padding.chunk(ranks, 1)[parallel_state.get_tensor_model_parallel_rank()]
    given: dict[str, Any] = {"packed_seq_params": layout.packed, "padding_mask": padding.contiguous()}
    if ahead:
        given["ahead"] = ahead
    return model(layout.ids_RL, layout.positions_RL, None, **given)


def _logprobs(
    logits: torch.Tensor, layout: SequenceLayout, temperature: float, model: torch.nn.Module, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logprobs_BT aligned with the ids and, where asked, the entropy_BT of the distributions they were picked from;
    both 0 at the first position and in the padding, and whole on every rank."""
    over, how = parallel_state.get_context_parallel_group(), _softmax(temperature, model)
    if not entropy:
        return layout.to_rows(token_logprobs(logits, layout.targets_RL, **how), over), None
    logprobs_RL, entropy_RL = token_logprobs_and_entropy(logits, layout.targets_RL, **how)
    return layout.to_rows(logprobs_RL, over), layout.to_rows(entropy_RL, over)


def _softmax(temperature: float, model: torch.nn.Module) -> dict[str, Any]:
    """What `token_logprobs` takes beside logits and ids."""
    return {
        "temperature": temperature,
        "vocab_size": get_attr_wrapped_model(model, "true_vocab_size"),
        "group": parallel_state.get_tensor_model_parallel_group(),
        "chunk_tokens": get_attr_wrapped_model(model, "logprob_chunk_tokens"),
    }


def _run(models: list[Any], batches: list[MicroBatch], forward_step: Any, *, train: bool) -> list[Any]:
    """megatron-core's schedule for this topology. Returns what the loss function gave, on the last stage."""
    iterators: list[Iterator[MicroBatch]] = [iter(batches) for _ in models]  # one a model chunk
    single = len(models) == 1
    config = get_model_config(models[0])
    length = max(1, max(batch.ids_BT.shape[1] for batch in batches) - 1)
    if config.sequence_parallel:  # as `_forward` pads it
        length += -length % config.tensor_model_parallel_size
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators[0] if single else iterators,
        model=models[0] if single else models,
        num_microbatches=len(batches),
        # In force over a pipeline whose micro-batches all have one shape; else shapes travel with the tensors.
        seq_length=length,
        micro_batch_size=max(1, batches[0].ids_BT.shape[0]),
        forward_only=not train,
        collect_non_loss_data=not train,
    )


def _check_counts(batches: list[MicroBatch]) -> None:
    counts = torch.tensor([len(batches), -len(batches)], device=own_device())
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    most, least = int(counts[0]), -int(counts[1])
    if most != least or most == 0:
        raise ValueError(
            f"ranks bring between {least} and {most} micro-batches (this one {len(batches)}); "
            f"each needs the same number, at least one: fill up with empty ones"
        )


#: Metrics under this prefix are reduced by maximum, all others by sum.
MAX = "max/"


def _reduce(into: dict[str, float], metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        number = float(value)
        if name not in into:
            into[name] = number
        else:
            into[name] = max(into[name], number) if name.startswith(MAX) else into[name] + number


def _over_ranks(sums: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Metrics over micro-batches and data-parallel ranks; the same on every rank. Names may differ by rank."""
    own: dict[str, float] = {}
    for metrics in sums:
        _reduce(own, metrics)
    group = parallel_state.get_data_parallel_group()  # context-parallel ranks hold the same rows
    total: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, own, group=group)
        for metrics in gathered:  # in rank order, so that every rank adds alike
            _reduce(total, metrics)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        total = _from_last_stage(total)
    return total


def train_step(
    models: list[Any],
    optimizer: Any,
    batches: list[MicroBatch],
    loss_fn: LossFunction,
    *,
    lr: float,
    tokens: float,
    temperature: float = 1.0,
    step: int = 0,
    entropy: bool = False,
) -> StepResult:
    """Forward, backward and one optimizer step over the global batch. Collective: every rank must call it.

    Args:
        models: chunks from `optimizer.wrap`.
        batches: this rank's micro-batches; the same number on each rank, empty ones allowed.
        loss_fn: see `LossFunction`; not called for an empty micro-batch.
        lr: learning rate of this step.
        tokens: global denominator, the same on each rank. May exceed the tokens in the micro-batches
            (rows without signal are left out of them but count).
        temperature: the logits are divided by it before the softmax.
        step: names the step in errors.
        entropy: give the loss function a column `entropy`, float32 [B, T] in nats, differentiable: that of the
            distribution each token was picked from, 0 at the first position and in the padding.

    Raises:
        NonFiniteGradient: the gradient norm is not finite (in fp16: at the smallest loss scale). Parameters, optimizer state and router biases
            are as before the call.
        ValueError: the ranks disagree on the number of micro-batches, or tokens is not above 0.
    """
    if not tokens > 0:
        raise ValueError(f"step {step}: tokens={tokens}; a step needs at least one trained token")
    _check_counts(batches)
    config, device = get_model_config(models[0]), own_device()

    def loss_of(
        batch: MicroBatch,
        layout: SequenceLayout,
        counted: bool,
        ahead: list[SequenceLayout],
        heads: list[torch.Tensor],
        logits: torch.Tensor,
    ) -> Any:
        logprobs, entropy_BT = _logprobs(logits, layout, temperature, models[0], entropy)
        if entropy_BT is not None:
            batch.columns["entropy"] = entropy_BT  # the batch is this pass's own copy
        if counted:
            loss, metrics = loss_fn(logprobs, batch)
        else:
            loss, metrics = logprobs.sum() * 0.0, {}  # keeps the graph, so that backward meets the other ranks
        sums = {name: torch.as_tensor(value).detach() for name, value in metrics.items()}
        sums[""] = loss.detach()
        if heads:
            extra = heads_loss(
                heads, ahead, batch.columns["mask"] if counted else None,
                lambda logits, layout: _logprobs(logits, layout, temperature, models[0])[0],
            )  # fmt: skip
            sums["mtp_cross_entropy"] = extra.detach()
            loss = loss + config.mtp_loss_scaling_factor * extra
        no_tokens = torch.zeros((), dtype=torch.int, device=logits.device)  # `finalize` divides by `tokens`
        return loss.float(), no_tokens, sums

    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> Any:
        batch = next(batches)
        counted = not is_empty(batch)
        layout = _lay_out(model, batch := _runnable(batch), device)
        ahead = [_lay_out(model, batch, device, ahead=head) for head in range(1, head_count(model) + 1)]
        batch = _to(batch, device)
        output = _forward(model, layout, ahead)
        return output, partial(loss_of, batch, layout, counted, ahead, predictions(model))

    def finalize(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        finalize_model_grads(chunks, None, **kwargs)
        for chunk in chunks:
            chunk.scale_gradients(1.0 / tokens)

    biases = [(router, router.expert_bias.clone()) for router in routers(models)]

    @torch.no_grad()
    def restore_biases() -> None:
        for router, bias in biases:
            router.expert_bias.copy_(bias)

    config.finalize_model_grads_func = finalize
    scale, overflows = loss_scale.of(parts(optimizer)), 0
    while True:
        for chunk in models:
            chunk.train()
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        sums = _run(models, conform(models, batches), forward_step, train=True)
        metrics = _over_ranks(sums)
        loss = metrics.pop("", 0.0) / tokens

        # Asked before the step: megatron-core would clip by a NaN norm and apply the result.
        overflow = optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if scale is None or not overflow or scale.at_minimum or not math.isfinite(loss):
            break
        # fp16: the scaled gradients left the type's range. The same batch again at half the scale, so that no
        # batch is counted as trained without having been.
        overflows += 1
        scale.settle()
        restore_biases()
    finite = math.isfinite(grad_norm)
    if head_count(models[0]) and (heads_norm := heads_grad_norm(optimizer)) is not None:
        metrics[MAX + "mtp_grad_norm"] = heads_norm
        finite = finite and math.isfinite(heads_norm)
    if not finite:
        restore_biases()
        if scale is not None:
            scale.settle()
        raise NonFiniteGradient(
            f"step {step}: the gradient norm is {grad_norm} (loss {loss}{_heads(metrics)}); the step was not applied. "
            f"Look for infinite logprobs or advantages in this batch, or lower the learning rate"
        )
    set_learning_rate(optimizer, lr)
    if not apply_prepared(optimizer):  # a batch must not pass for trained without having been
        raise RuntimeError(f"step {step}: megatron-core's optimizer did not apply a finite gradient")
    used = 1.0 if scale is None else scale.value
    if scale is not None:
        scale.settle()
    return StepResult(loss, grad_norm, float(tokens), lr, True, metrics, used, overflows)


def _heads(metrics: Mapping[str, float]) -> str:
    """What an error about the gradient says of the prediction heads, which have a norm of their own."""
    norm = metrics.get(MAX + "mtp_grad_norm")
    return "" if norm is None else f", the prediction heads' norm {norm}"


@torch.no_grad()
def forward_logprobs(
    models: list[Any], batches: list[MicroBatch], temperature: float = 1.0, packing: bool | None = None
) -> list[torch.Tensor]:
    """Logprobs of the given tokens under the present weights, by the same path as training. Collective.

    `packing` says how rows lie in the model's input; None is the recipe's way. Returns one float32 [B, T] on the CPU
    per micro-batch (0 at the first position and in the padding; [B, T] of zeros for an empty one), on every rank.

    Raises:
        ValueError: the ranks disagree on the number of micro-batches.
    """
    _check_counts(batches)
    device = own_device()

    def keep(layout: SequenceLayout, logits: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
        return _logprobs(logits, layout, temperature, models[0])[0].cpu()

    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> Any:
        layout = _lay_out(model, _runnable(next(batches)), device, packing)
        return _forward(model, layout), partial(keep, layout)

    results = _run(models, conform(models, batches), forward_step, train=False)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        results = _from_last_stage(results)
    return [
        torch.zeros(batch.ids_BT.shape, dtype=torch.float32)
        if is_empty(batch)
        else result[: batch.ids_BT.shape[0], : batch.ids_BT.shape[1]]
        for batch, result in zip(batches, results, strict=False)  # `conform` adds micro-batches at the end
    ]


def _from_last_stage(value: Any) -> Any:
    """The last pipeline stage's value, on every stage."""
    carried = [value]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(carried, last, group=parallel_state.get_pipeline_model_parallel_group())
    return carried[0]
