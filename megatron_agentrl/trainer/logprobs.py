"""Logprobs of given tokens, and the entropy of their distribution, from the model's logits.

The softmax runs in float32 over the real vocabulary only: padding columns exist because of one parallel layout, and
a softmax over them would be another policy than the engine's. The columns may be shared by tensor-parallel ranks.

Float32 exists for one chunk of tokens at a time: at most two tensors [chunk, columns held here] in the forward pass
and three in the backward pass, whatever the number of tokens. The backward pass computes each chunk's softmax again and
writes its gradient in the logits' own type; between the passes two float32 numbers a token are kept (one more with
the entropy). The logits themselves are the model's output and lie whole in its type: see docs/logprobs.md.

Shapes: B rows, T positions, N tokens (B·T), n tokens of one chunk, V columns held here, R real ones among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

#: Tokens whose float32 logits exist at once, where the caller does not say (the recipe's default).
CHUNK_TOKENS = 1024


def token_logprobs(
    logits_BTV: torch.Tensor,
    ids_BT: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """log softmax(logits / temperature)[ids] as float32 [B, T], differentiable.

    Args:
        logits_BTV: this rank's columns, in order of rank, of the padded vocabulary.
        ids_BT: int64 ids below `vocab_size`, aligned with the logits (the token each position predicts).
        temperature: the sampling temperature, above 0.
        vocab_size: real tokens; columns from here on are left out of the softmax.
        group: tensor-parallel group that shares the columns; None or one rank when all are here. Its ranks must call
            with the same tokens; two all-reduces of a number or two a token are all that travels.
        chunk_tokens: tokens whose logits exist in float32 at once. The result does not depend on it.

    Raises:
        ValueError: the temperature or the chunk is not above 0, or an id is outside the vocabulary.
    """
    _check(ids_BT, temperature, vocab_size, chunk_tokens)
    return _TokenLogprobs.apply(logits_BTV, ids_BT, temperature, vocab_size, group, chunk_tokens, False)[0]


def token_logprobs_and_entropy(
    logits_BTV: torch.Tensor,
    ids_BT: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `token_logprobs`, and the entropy in nats of the distribution each id was picked from, float32 [B, T].

    Both come from one pass over the logits and both are differentiable.
    """
    _check(ids_BT, temperature, vocab_size, chunk_tokens)
    logprobs_BT, entropy_BT = _TokenLogprobs.apply(
        logits_BTV, ids_BT, temperature, vocab_size, group, chunk_tokens, True
    )
    return logprobs_BT, entropy_BT


def _check(ids_BT: torch.Tensor, temperature: float, vocab_size: int, chunk_tokens: int) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: logprobs exist for temperatures above 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: expected at least one token a chunk")
    if ids_BT.numel() and not 0 <= int(ids_BT.min()) <= int(ids_BT.max()) < vocab_size:
        raise ValueError(
            f"token ids reach from {int(ids_BT.min())} to {int(ids_BT.max())}, the vocabulary has {vocab_size} tokens"
        )


class _TokenLogprobs(torch.autograd.Function):
    """(logits_BTV, ids_BT, ...) -> (logprobs_BT, entropy_BT or None), chunk by chunk in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BTV: torch.Tensor,
        ids_BT: torch.Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk_tokens: int,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shares = group is not None and group.size() > 1
        columns = logits_BTV.shape[-1]
        first = columns * group.rank() if group is not None and shares else 0
        real = max(0, min(columns, vocab_size - first))
        logits_NV, ids_N = logits_BTV.reshape(-1, columns), ids_BT.reshape(-1) - first
        reduce: Any = _shared if shares else _alone
        logprobs_N, entropy_N, kept = reduce(logits_NV[:, :real], ids_N, temperature, group, chunk_tokens, entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_BTV, ids_N, entropy_N, *kept)
        ctx.real, ctx.temperature, ctx.chunk_tokens = real, temperature, chunk_tokens
        return logprobs_N.view(ids_BT.shape), entropy_N.view(ids_BT.shape) if entropy_N is not None else None

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """d logprob[k] / d z = onehot(k) - p and d entropy / d z = -p (log p + entropy), for z = logits / temperature."""
        grad_logprobs_BT, grad_entropy_BT = grads
        logits_BTV, ids_N, entropy_N, *kept = ctx.saved_tensors
        if grad_logprobs_BT is None and grad_entropy_BT is None:
            return (None,) * 7
        real, columns = ctx.real, logits_BTV.shape[-1]
        logits_NV = logits_BTV.reshape(-1, columns)
        grad_NV = torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
        grad_NV[:, real:] = 0
        here_N = (ids_N >= 0) & (ids_N < real)
        at_N1 = torch.where(here_N, ids_N, 0)[:, None]
        grad_N1 = _column(grad_logprobs_BT, ids_N)
        picked_N1 = torch.where(here_N[:, None], grad_N1, 0.0)
        for part in _chunks(len(ids_N), ctx.chunk_tokens if real else 0):
            scaled_nR = _scaled(logits_NV[part, :real], ctx.temperature)
            if kept:
                log_p_nR = scaled_nR.sub_(kept[0][part, None]).sub_(kept[1][part, None])
            else:
                log_p_nR = scaled_nR.log_softmax(-1)
            del scaled_nR
            if grad_entropy_BT is None and not kept:  # what autograd runs for log_softmax, to the last bit
                onehot_nR = torch.zeros_like(log_p_nR).scatter_(1, at_N1[part], picked_N1[part])
                grad_nR = torch.ops.aten._log_softmax_backward_data(onehot_nR, log_p_nR, 1, torch.float32)
                del onehot_nR
            else:
                grad_nR = log_p_nR.exp()
                if grad_entropy_BT is None:
                    grad_nR.mul_(-grad_N1[part])
                else:
                    factor_nR = log_p_nR.add_(entropy_N[part, None]).mul_(_column(grad_entropy_BT, ids_N)[part])
                    grad_nR.mul_(factor_nR.add_(grad_N1[part])).neg_()
                    del factor_nR
                grad_nR.scatter_add_(1, at_N1[part], picked_N1[part])
            del log_p_nR
            grad_NV[part, :real] = grad_nR.div_(ctx.temperature)
            del grad_nR  # else it would still be there beside the next chunk's
        return grad_NV.view(logits_BTV.shape), None, None, None, None, None, None


def _column(grad_BT: torch.Tensor | None, ids_N: torch.Tensor) -> torch.Tensor:
    """A gradient by token as [N, 1]; zeros where there is none."""
    if grad_BT is None:
        return torch.zeros(len(ids_N), 1, dtype=torch.float32, device=ids_N.device)
    return grad_BT.reshape(-1, 1)


_Reduced = tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]


def _alone(
    logits_NR: torch.Tensor, ids_N: torch.Tensor, temperature: float, group: Any, chunk_tokens: int, entropy: bool
) -> _Reduced:
    """All real columns are here: torch's log_softmax, a chunk at a time. Returns (logprobs_N, entropy_N, nothing)."""
    logprobs_N = torch.empty(len(ids_N), dtype=torch.float32, device=logits_NR.device)
    entropy_N = torch.empty_like(logprobs_N) if entropy else None
    for part in _chunks(len(ids_N), chunk_tokens):
        log_p_nR = _scaled(logits_NR[part], temperature).log_softmax(-1)
        logprobs_N[part] = log_p_nR.gather(-1, ids_N[part, None])[:, 0]
        if entropy_N is not None:
            entropy_N[part] = -log_p_nR.exp().mul_(log_p_nR).sum(-1)
        del log_p_nR  # else it would still be there beside the next chunk's
    return logprobs_N, entropy_N, ()


def _shared(
    logits_NR: torch.Tensor,
    ids_N: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup,
    chunk_tokens: int,
    entropy: bool,
) -> _Reduced:
    """The columns are spread over `group`: each rank's own maximum and sums, then two all-reduces over all tokens.

    Returns (logprobs_N, entropy_N, (max_N, log_sum_N)), where log p = z - max - log_sum.
    """
    columns = logits_NR.shape[1]
    # A rank may hold padding only: its maximum is then the least number, and its sums count for nothing.
    own_max_N = torch.full(ids_N.shape, torch.finfo(torch.float32).min, device=logits_NR.device)
    sums_3N = torch.zeros(3, *ids_N.shape, device=logits_NR.device)  # exp(z - max); that times (z - max); target's z
    for part in _chunks(len(ids_N), chunk_tokens if columns else 0):
        scaled_nR = _scaled(logits_NR[part], temperature)
        own_max_N[part] = scaled_nR.amax(-1)
        here_n = (ids_N[part] >= 0) & (ids_N[part] < columns)
        target_n = scaled_nR.gather(-1, torch.where(here_n, ids_N[part], 0)[:, None])[:, 0]
        sums_3N[2, part] = torch.where(here_n, target_n, 0.0)
        shifted_nR = scaled_nR.sub_(own_max_N[part, None])
        weight_nR = shifted_nR.exp()
        sums_3N[0, part] = weight_nR.sum(-1)
        if entropy:
            sums_3N[1, part] = weight_nR.mul_(shifted_nR).sum(-1)
        del scaled_nR, shifted_nR, weight_nR  # else they would still be there beside the next chunk's
    max_N = own_max_N.clone()
    dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)
    behind_N = own_max_N - max_N
    weight_N = behind_N.exp()
    sums_3N[1] = weight_N * (sums_3N[1] + sums_3N[0] * behind_N)
    sums_3N[0] *= weight_N
    dist.all_reduce(sums_3N, group=group)
    log_sum_N = sums_3N[0].log()
    logprobs_N = sums_3N[2] - max_N - log_sum_N
    entropy_N = log_sum_N - sums_3N[1] / sums_3N[0] if entropy else None
    return logprobs_N, entropy_N, (max_N, log_sum_N)


def _scaled(logits_nR: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature in float32, in memory of its own."""
    return logits_nR.to(torch.float32, copy=True).div_(temperature)


def _chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Consecutive slices of at most `chunk_tokens`; none where that is 0."""
    for start in range(0, tokens if chunk_tokens else 0, max(1, chunk_tokens)):
        yield slice(start, min(tokens, start + chunk_tokens))
