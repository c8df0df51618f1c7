"""On-policy distillation: the reverse KL to a teacher, per token, as an advantage on tokens that the policy sampled.

With d = log pi - log teacher at a sampled token, E_pi[d] is KL(pi || teacher) of that position, and its gradient is
E_pi[d * grad log pi] (the gradient of d itself has mean 0 and is left out). A token whose advantage is -d therefore
descends the reverse KL of its own position; what the token does to later positions is not credited (discount 0).
Differentiating an estimate of the KL instead would not: the gradient of `kl`'s k3 on sampled tokens is that of the
forward KL(teacher || pi), and the gradient of its k1 has mean 0.

Sources: Agarwal et al., "On-Policy Distillation of Language Models" (arXiv 2306.13649), for training on the student's
own tokens; Thinking Machines Lab, "On-Policy Distillation" (2025), for the form with d as an advantage; Schulman,
"Approximating KL Divergence" (2020), for k1 and k3.
"""

from __future__ import annotations

import torch


def distillation_advantages(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log teacher - log pi per trained token (nats), 0 elsewhere; a constant. Shapes [..., T] alike.

    Args:
        logprobs: of the policy that is trained, at the present weights: the estimate is of their divergence. Tokens
            that an older version sampled are weighted by the loss's importance ratio.
        mask: True (or nonzero) where a token is trained; elsewhere the arguments may hold anything.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return torch.where(mask.bool(), teacher_logprobs - logprobs.detach(), zero)
