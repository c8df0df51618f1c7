"""Run as three processes by test_logprobs: shares of a vocabulary against the whole of it, in one process's words.

argv: folder for the results. Each case is drawn from its own seed, so that every rank sees the same whole logits.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_agentrl.trainer.logprobs import token_logprobs_and_entropy

#: (tensor-parallel size, real vocabulary, columns a rank holds, rows, positions, temperature, tokens a chunk).
#: With 101 tokens over 3 x 64 columns the last rank holds padding only.
CASES = [
    (2, 101, 64, 2, 9, 1.0, 5),
    (2, 128, 64, 1, 1, 0.7, 1024),
    (2, 65, 64, 3, 4, 1.7, 12),
    (2, 1000, 512, 2, 17, 1.0, 1),
    (3, 101, 64, 2, 5, 1.0, 3),
    (3, 180, 64, 4, 7, 0.5, 28),
]


def gaps(case: tuple, group: dist.ProcessGroup) -> dict[str, float]:
    """Largest difference of each result from plain log_softmax over the whole real vocabulary, in float32."""
    size, vocab, columns, rows, positions, temperature, chunk = case
    generator = torch.Generator().manual_seed(vocab * 31 + positions)
    whole = 4 * torch.randn(rows, positions, size * columns, generator=generator)
    ids = torch.randint(0, vocab, (rows, positions), generator=generator)
    ids.view(-1)[0], ids.view(-1)[-1] = 0, vocab - 1
    weights = torch.randn(2, rows, positions, generator=generator)
    plain = whole.clone().requires_grad_()
    log_p = (plain / temperature)[..., :vocab].log_softmax(-1)
    want = log_p.gather(-1, ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    (weights[0] * want[0] + weights[1] * want[1]).sum().backward()

    first = group.rank() * columns
    mine = whole[..., first : first + columns].clone().requires_grad_()
    got = token_logprobs_and_entropy(mine, ids, temperature, vocab, group, chunk)
    (weights[0] * got[0] + weights[1] * got[1]).sum().backward()
    share = plain.grad[..., first : first + columns]
    only = whole[..., first : first + columns].clone().requires_grad_()
    (weights[0] * token_logprobs_and_entropy(only, ids, temperature, vocab, group, chunk)[0]).sum().backward()
    alone = whole.clone().requires_grad_()
    (
        (alone / temperature)[..., :vocab].log_softmax(-1).gather(-1, ids[..., None])[..., 0] * weights[0]
    ).sum().backward()
    return {
        "logprob": float((got[0] - want[0]).abs().max()),
        "entropy": float((got[1] - want[1]).abs().max()),
        "gradient": float((mine.grad - share).abs().max()),
        "gradient of logprobs": float((only.grad - alone.grad[..., first : first + columns]).abs().max()),
        "padding": float(mine.grad[..., max(0, vocab - first) :].abs().sum()),
    }


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    groups = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    found = [gaps(case, groups[case[0]]) if rank < case[0] else {} for case in CASES]
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
