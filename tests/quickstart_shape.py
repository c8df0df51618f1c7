"""The model of the quickstart as a config, and the files of a folder that holds it: shared by several rooms' tests."""

import json
from pathlib import Path

CONFIG = {
    "model_type": "nemotron_h",
    "vocab_size": 272,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "hybrid_override_pattern": "M*EM*E",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    "ssm_state_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
}


def write_model(folder: Path) -> None:
    """What a recipe's check looks for; no tokenizer that could be loaded, no weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
