"""Peak memory of the logprob path beyond the logits and their gradient: `python -m benchmarks.logprob_memory`.

Each measurement is a process of its own: bf16 logits are made, the process's peak resident memory is read, then
logprobs, entropy and the backward pass run by chunks (or the plain log_softmax over all tokens), and the peak is read
again. The logits' gradient is as large as the logits and is taken off; what remains is what the path itself needs. It
does not grow with the tokens, so that fewer than the full number may be measured where memory is short.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

VOCABULARY = 131072
GIB = 1024**3

EXAMPLES = """\
examples:
  python -m benchmarks.logprob_memory
  python -m benchmarks.logprob_memory --tokens 1024 4096 --chunk 512
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.logprob_memory",
        description=__doc__.split("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="tokens of each measurement")
    parser.add_argument("--chunk", type=int, default=256, help="tokens a chunk (default 256)")
    parser.add_argument("--plain", action="store_true", help="the plain log_softmax, for comparison")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(peak(arguments.one, arguments.chunk, arguments.plain)))
        return 0
    budget = 3 * arguments.chunk * VOCABULARY * 4
    print(
        f"vocabulary {VOCABULARY:,}, bf16; chunk budget 3 x {arguments.chunk} x {VOCABULARY:,} x 4 = {budget / GIB:.3f} GiB"
    )
    print(f"{'tokens':>8}  {'logits GiB':>10}  {'beyond logits and gradient GiB':>30}")
    for tokens in arguments.tokens:
        command = [
            sys.executable,
            "-m",
            "benchmarks.logprob_memory",
            "--one",
            str(tokens),
            "--chunk",
            str(arguments.chunk),
        ]
        command += ["--plain"] if arguments.plain else []
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
        print(f"{tokens:>8,}  {found['logits'] / GIB:>10.3f}  {found['beyond'] / GIB:>30.3f}", flush=True)
    return 0


def peak(tokens: int, chunk: int, plain: bool) -> dict[str, float]:
    """Bytes of the logits, and of the peak beyond them and their gradient."""
    import torch

    from megatron_agentrl.trainer.logprobs import token_logprobs_and_entropy

    torch.manual_seed(0)
    logits = torch.empty(1, tokens, VOCABULARY, dtype=torch.bfloat16)
    row = torch.randn(VOCABULARY).bfloat16()
    for position in range(tokens):
        logits[0, position] = row.roll(position)
    logits.requires_grad_()
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    token_logprobs_and_entropy(logits[:, :1], ids[:, :1], 1.0, VOCABULARY)  # what torch sets up once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if plain:
        log_p = logits.float().log_softmax(-1)
        log_p.gather(-1, ids[..., None]).sum().backward()
    else:
        logprobs, entropy = token_logprobs_and_entropy(logits, ids, 1.0, VOCABULARY, None, chunk)
        (logprobs.sum() - 0.01 * entropy.sum()).backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = logits.numel() * logits.element_size()
    return {"logits": size, "beyond": after - before - size}


if __name__ == "__main__":
    sys.exit(main())
