"""The command lines of `tools/convert/`: arguments, messages and exit codes. torch is loaded after the arguments.

Exit codes: 0 done (verify: equal), 1 refused or failed (verify: different), 2 a wrong command line (verify: unusable).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ARCHITECTURES = ("nemotron_h", "nemotron_h_latent", "qwen3_moe", "qwen3", "llama", "deepseek_v3")
TYPES = ("bfloat16", "float16", "float32")


def _parser(description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, epilog="examples:\n" + examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=_positive, metavar="N", help="threads (default: one a CPU, at most 8)")
    parser.add_argument(
        "--force", action="store_true", help="replace DST where it exists, once the new one is complete"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: expected 1 or more")
    return value


def hf_to_megatron(argv: Sequence[str] | None = None) -> int:
    """`hf_to_megatron.py SRC DST --tp --pp --vpp --ep --etp`."""
    parser = _parser(
        "Write a Hugging Face folder as a megatron-core distributed checkpoint.\n\n"
        "The topology decides how the files are cut, as its ranks would have written them; the checkpoint loads at any "
        "topology. Types are kept, FP8 blocks are multiplied out; what must be float32 (router bias, A_log, D, dt_bias) "
        "is. DST appears complete or not at all; a run after a killed one starts clean.",
        "  hf_to_megatron.py Qwen3-30B-A3B ckpt/qwen --tp 2 --ep 8 --etp 1\n"
        "  hf_to_megatron.py DeepSeek-V3 ckpt/v3 --pp 16 --ep 8 --mtp --first-stage-layers 6 --last-stage-layers 4",
    )
    parser.add_argument("src", type=Path, metavar="SRC", help="folder with config.json and safetensors")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write; must not exist")
    for name, what in (
        ("tp", "tensor-parallel size"),
        ("pp", "pipeline-parallel size"),
        ("vpp", "virtual pipeline stages per rank"),
        ("ep", "expert-parallel size"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what} (default 1)")
    parser.add_argument("--etp", type=int, metavar="N", help="expert-tensor-parallel size (default: as --tp)")
    for name in ("first", "last"):
        parser.add_argument(
            f"--{name}-stage-layers",
            type=int,
            metavar="N",
            help=f"layers of the {name} stage, where pp does not divide",
        )
    parser.add_argument(
        "--mtp",
        action="store_true",
        help="make the multi-token-prediction heads parameters, for a trainer with model.mtp.train=true; without it they "
        "are kept beside the checkpoint and come back with an export",
    )
    _common(parser)
    args = parser.parse_args(argv)

    def work() -> int:
        from megatron_agentrl.convert import jobs
        from megatron_agentrl.convert.to_megatron import Cut, hf_to_megatron

        cut = Cut(args.tp, args.pp, args.vpp, args.ep, args.etp, args.first_stage_layers, args.last_stage_layers)
        hf_to_megatron(args.src, args.dst, cut, args.mtp, args.workers or jobs.WORKERS, args.force, args.quiet)
        print(f"{args.dst} is complete")
        return 0

    return _guarded(work, 1)


def megatron_to_hf(argv: Sequence[str] | None = None) -> int:
    """`megatron_to_hf.py SRC DST [--dtype] [--fp8-blockwise]`."""
    parser = _parser(
        "Write a megatron-core distributed checkpoint as a Hugging Face folder that a server starts from.\n\n"
        "SRC is a converted checkpoint or one of a run (checkpoints/step_N; its optimizer state is left aside). "
        "config.json, tokenizer, chat template and untrained prediction heads come from the model that it began as.",
        "  megatron_to_hf.py ckpt/qwen Qwen3-trained\n"
        "  megatron_to_hf.py runs/quickstart/checkpoints/step_40 out --dtype bfloat16\n"
        "  megatron_to_hf.py ckpt/v3 DeepSeek-V3-trained --fp8-blockwise",
    )
    parser.add_argument("src", type=Path, metavar="SRC", help="distributed checkpoint")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=TYPES, help="type of the weights (default: as stored)")
    parser.add_argument(
        "--fp8-blockwise", action="store_true", help="linears of attention, MLP and experts in FP8, blocks of 128 x 128"
    )
    parser.add_argument("--hf", type=Path, metavar="FOLDER", help="the Hugging Face folder that the weights began as")
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="largest file (default 5)")
    _common(parser)
    args = parser.parse_args(argv)

    def work() -> int:
        from megatron_agentrl.convert import jobs, to_hf

        to_hf.megatron_to_hf(
            args.src,
            args.dst,
            to_hf.TYPES[args.dtype] if args.dtype else None,
            args.fp8_blockwise,
            args.hf,
            int(args.shard_gb * 10**9),
            args.workers or jobs.WORKERS,
            args.force,
            args.quiet,
        )
        print(f"{args.dst} is complete")
        return 0

    return _guarded(work, 1)


def verify(argv: Sequence[str] | None = None) -> int:
    """`verify.py A B`."""
    parser = _parser(
        "Compare two checkpoints of either kind, value by value, and print the first difference.\n\n"
        "Exit code 0: equal, 1: different, 2: one of them cannot be used.",
        "  verify.py Qwen3-30B-A3B ckpt/qwen\n  verify.py runs/a/checkpoints/step_10 runs/b/checkpoints/step_10",
    )
    parser.add_argument("a", type=Path, metavar="A", help="Hugging Face folder or distributed checkpoint")
    parser.add_argument("b", type=Path, metavar="B", help="the other one")
    parser.add_argument("--hf", type=Path, metavar="FOLDER", help="the Hugging Face folder that a checkpoint began as")
    parser.add_argument("--workers", type=_positive, metavar="N", help="threads (default: one a CPU, at most 8)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)

    def work() -> int:
        from megatron_agentrl.convert import jobs
        from megatron_agentrl.convert.compare import compare

        difference, count = compare(args.a, args.b, args.hf, args.workers or jobs.WORKERS, args.quiet)
        print(difference.text if difference else f"equal: {count} tensors")
        return 1 if difference else 0

    return _guarded(work, 2)


def inspect(argv: Sequence[str] | None = None) -> int:
    """`inspect.py CKPT`."""
    parser = _parser(
        "Print what a checkpoint holds: architecture, counts, types, topology, sizes. No weight is read.",
        "  inspect.py Qwen3-30B-A3B\n  inspect.py runs/quickstart/checkpoints/step_40 --tensors",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="Hugging Face folder or distributed checkpoint")
    parser.add_argument("--tensors", action="store_true", help="list every tensor too")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--hf", type=Path, metavar="FOLDER", help="the Hugging Face folder that a checkpoint began as")
    args = parser.parse_args(argv)

    def work() -> int:
        from megatron_agentrl.convert.describe import as_json, describe, table

        rows, tensors = describe(args.checkpoint, args.hf)
        if args.json:
            print(as_json(rows, tensors))
            return 0
        print(table(rows))
        if args.tensors:
            print()
            print(table([(name, f"{dtype:<13}  {list(shape)}") for name, shape, dtype, _ in tensors]))
        return 0

    return _guarded(work, 1)


def make_tiny(argv: Sequence[str] | None = None) -> int:
    """`make_tiny.py ARCH DST`."""
    parser = _parser(
        "Write a tiny random Hugging Face checkpoint of a known architecture, with tokenizer and chat template.",
        "  make_tiny.py qwen3_moe /tmp/tiny\n  make_tiny.py deepseek_v3 /tmp/tiny-v3 --seed 7 --dtype bfloat16 --no-mtp",
    )
    parser.add_argument("arch", choices=ARCHITECTURES, metavar="ARCH", help=", ".join(ARCHITECTURES))
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write; must not exist")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default 0)")
    parser.add_argument("--dtype", choices=TYPES, default="float32", help="type of the weights (default float32)")
    parser.add_argument("--no-mtp", action="store_true", help="without multi-token-prediction heads")
    parser.add_argument("--force", action="store_true", help="replace DST where it exists")
    args = parser.parse_args(argv)

    def work() -> int:
        import torch

        from megatron_agentrl.convert.tiny import make_tiny

        dtype = getattr(torch, args.dtype)
        make_tiny(args.arch, args.dst, args.seed, dtype, heads=not args.no_mtp, replace=args.force)
        print(f"{args.dst} is complete")
        return 0

    return _guarded(work, 1)


def _guarded(work: Callable[[], int], failed: int) -> int:
    """Run `work`; what it refuses is printed in one line, and the exit code is `failed`."""
    from megatron_agentrl.convert.errors import ConvertError
    from megatron_agentrl.layout.boxes import LayoutError
    from megatron_agentrl.recipe.weight_files import WeightsError

    try:
        return work()
    except (ConvertError, WeightsError, LayoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
