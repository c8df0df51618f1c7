"""Conversion against a plain copy of the same bytes: `python -m benchmarks.convert FOLDER --json FILE`.

A generated checkpoint (llama, bfloat16) goes Hugging Face -> distributed -> Hugging Face, each in a process of its own,
and its files are copied by `shutil`, to disk in all cases. What was read is dropped from the page cache before each. The
ratio is the copy's seconds over the conversion's, so it does not depend on the disk. Peak memory is that of the whole
process, against three times the largest tensor and 1 GB. FOLDER needs three times the size; what was made is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_agentrl.convert.safetensors_io import Shards
from megatron_agentrl.layout.megatron import hf_tensors

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64000, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 8192,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_CHILD = """
import json, resource, sys, time
start = time.perf_counter()
from pathlib import Path
from megatron_agentrl.convert.to_hf import megatron_to_hf
from megatron_agentrl.convert.to_megatron import Cut, hf_to_megatron
loaded = time.perf_counter()
source, target, tp, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
if tp:
    hf_to_megatron(source, target, Cut(tp=tp), workers=workers, quiet=True)
else:
    megatron_to_hf(source, target, workers=workers, quiet=True)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": time.perf_counter() - loaded, "start_seconds": loaded - start, "peak_bytes": peak}))
"""


def generate(folder: Path, gigabytes: float) -> dict[str, Any]:
    """A model of at least that size; returns its bytes and those of the largest tensor."""
    config = CONFIG | {"num_hidden_layers": 1}
    while 2 * sum(prod(shape) for shape in hf_tensors(config).values()) < gigabytes * 1e9:
        config["num_hidden_layers"] += 1
    folder.mkdir(parents=True)
    shapes = hf_tensors(config)
    with Shards(folder, {name: (torch.bfloat16, shape) for name, shape in shapes.items()}, 2 * 10**9) as shards:
        for number, (name, shape) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(number)
            bits = torch.randint(0, 2**15, (prod(shape),), dtype=torch.int16, generator=generator)
            shards.write(name, bits.view(torch.bfloat16).view(shape[0], -1))
    (folder / "config.json").write_text(json.dumps(config))
    sizes = [2 * prod(shape) for shape in shapes.values()]
    return {"bytes": sum(sizes), "largest_tensor_bytes": max(sizes), "tensors": len(sizes)}


def drop_cache(folder: Path) -> None:
    """Out of the page cache with a folder's files, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> float:
    """Seconds of a plain copy, on disk at the end."""
    drop_cache(source)
    start = time.perf_counter()
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def convert(source: Path, target: Path, tp: int, workers: int) -> dict[str, Any]:
    """Seconds and peak memory of one conversion in a process of its own; tp = 0 is back to Hugging Face."""
    drop_cache(source)
    command = [sys.executable, "-c", _CHILD, str(source), str(target), str(tp), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="scratch folder; must not exist")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--tp", type=int, default=2, help="how the distributed checkpoint is cut")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    try:
        found: dict[str, Any] = generate(args.folder / "hf", args.gigabytes)
        copies = [copy(args.folder / "hf", args.folder / "copy")]
        shutil.rmtree(args.folder / "copy")
        found["hf_to_megatron"] = convert(args.folder / "hf", args.folder / "m", args.tp, args.workers)
        found["megatron_to_hf"] = convert(args.folder / "m", args.folder / "back", 0, args.workers)
        shutil.rmtree(args.folder / "back")
        copies.append(copy(args.folder / "hf", args.folder / "copy"))
    finally:
        shutil.rmtree(args.folder)
    found["copy_seconds"] = copies
    limit = 3 * found["largest_tensor_bytes"] + 10**9
    print(
        f"{found['bytes'] / 1e9:.2f} GB in {found['tensors']} tensors, the largest {found['largest_tensor_bytes'] / 1e6:.0f} MB"
    )
    speeds = " and ".join(f"{found['bytes'] / 1e9 / seconds:.2f}" for seconds in copies)
    print(f"copy: {speeds} GB/s, before and after")
    for name in ("hf_to_megatron", "megatron_to_hf"):
        part = found[name]
        part["gb_per_second"] = found["bytes"] / 1e9 / part["seconds"]
        part["of_a_copy"] = sum(copies) / len(copies) / part["seconds"]
        print(
            f"{name}: {part['gb_per_second']:.2f} GB/s, {part['of_a_copy']:.2f} of a copy (target 0.5); peak "
            f"{part['peak_bytes'] / 1e9:.2f} GB (limit {limit / 1e9:.2f})"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
