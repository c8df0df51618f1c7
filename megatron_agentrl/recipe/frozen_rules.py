"""Legality of the reference and the teacher: `algorithm.reference_path`, `teacher_path`, `teacher_coef`. No torch.

From config.json and tokenizer.json alone; whether a folder's weights are its config's model is the command line's
question, which reads their headers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_agentrl.recipe import model_rules
from megatron_agentrl.recipe.mla_rules import latent_packing_problems
from megatron_agentrl.recipe.precision_rules import precision_problems
from megatron_agentrl.recipe.schema import Advantage, Recipe
from megatron_agentrl.recipe.topology_rules import topology_problems

#: Further keys that change no logit of given ids: lengths (which other rules hold), heads that do not run here, training
#: and kernels. `_ROPE` are compared by their meaning.
_NO_LOGIT = {
    "max_position_embeddings", "num_nextn_predict_layers", "mtp_layers_block_type",
    "mtp_hybrid_override_pattern", "aux_loss_alpha", "seq_aux", "ep_size", "max_window_layers",
    "sliding_window", "attention_dropout", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype",
    "rescale_prenorm_residual", "moe_shared_expert_overlap", "time_step_min", "time_step_max",
    "time_step_floor", "mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor",
}  # fmt: skip
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}

#: Judges a config.json on its own: (folder, config) -> a line for each problem.
Judge = Callable[[Path, dict[str, Any]], Iterator[str]]


def frozen_problems(recipe: Recipe, config: dict[str, Any] | None, judge: Judge) -> Iterator[str]:
    """One line for each setting of reference or teacher without effect, or that cannot run beside the policy whose
    config.json is `config` (None: it could not be read). `judge` says what is wrong with a config.json by itself."""
    algorithm = recipe.algorithm
    if algorithm.reference_path is not None and not algorithm.kl_coef:
        yield (
            f"algorithm.reference_path={algorithm.reference_path}: has no effect with algorithm.kl_coef=0; leave it out "
            "or set algorithm.kl_coef"
        )
    if algorithm.teacher_path is not None and not algorithm.teacher_coef:
        yield (
            f"algorithm.teacher_path={algorithm.teacher_path}: has no effect with algorithm.teacher_coef=0; leave it out "
            "or set algorithm.teacher_coef"
        )
    if algorithm.teacher_coef and algorithm.teacher_path is None:
        yield (
            f"algorithm.teacher_coef={algorithm.teacher_coef}: needs a teacher; set algorithm.teacher_path to its "
            "Hugging Face folder"
        )
    if algorithm.advantage is Advantage.zero:
        if not algorithm.teacher_coef:
            yield (
                "algorithm.advantage=zero: the reward teaches nothing and there is no teacher; set algorithm.teacher_path "
                "and algorithm.teacher_coef, or algorithm.advantage=rloo"
            )
        if algorithm.shuffle_rewards:
            yield "algorithm.shuffle_rewards=true: has no effect with algorithm.advantage=zero; leave it out"
    if recipe.precision.fp8 and recipe.precision.fp8_param_gather and (algorithm.kl_coef or algorithm.teacher_coef):
        yield (
            "precision.fp8_param_gather=true: FP8 weights cannot change places with a reference's or a teacher's bit for "
            "bit; set precision.fp8_param_gather=false"
        )
    if config is None:
        return
    if algorithm.kl_coef and algorithm.reference_path is not None:
        yield from _folder_problems(recipe, config, judge, "reference_path")
    if algorithm.teacher_coef and algorithm.teacher_path is not None:
        yield from _folder_problems(recipe, config, judge, "teacher_path")


def config_differences(ours: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Entries that may change a logit and differ between two config.json dicts that are each legal, with both values.

    A key that is absent, null, false, 0 or empty says the same in all these forms.
    """
    kind = ours.get("model_type")
    if kind != other.get("model_type"):
        return [f"model_type is {other.get('model_type')!r}, the policy's {kind!r}"]
    fixed = set(model_rules.RULES[str(kind)].only) if kind in model_rules.RULES else set()
    ours, other = _comparable(ours), _comparable(other)
    return [
        f"{key} is {other.get(key)!r}, the policy's {ours.get(key)!r}"
        for key in sorted((ours.keys() | other.keys()) - fixed)
        if (ours.get(key) or None) != (other.get(key) or None)
    ]


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    found = model_rules.canonical(config)
    left = model_rules.BOOKKEEPING | _NO_LOGIT | _ROPE
    kept = {key: value for key, value in found.items() if key not in left and not key.startswith("_")}
    # Nemotron-H's attention has no positions, whatever its config says of them.
    return kept if config.get("model_type") == "nemotron_h" else kept | model_rules.rope_parameters(found)


def _folder_problems(recipe: Recipe, config: dict[str, Any], judge: Judge, leaf: str) -> Iterator[str]:
    key, folder = f"algorithm.{leaf}", Path(getattr(recipe.algorithm, leaf))
    other, fault = _read(folder / "config.json")
    if other is None:
        yield f"{key}={folder}: config.json {fault}; give a Hugging Face folder"
        return
    if unfit := list(judge(folder, other)):
        yield from (f"{key}: {line}" for line in unfit)
        return
    if leaf == "reference_path":
        if found := config_differences(config, other):
            more = f", and {len(found) - 3} more" if len(found) > 3 else ""
            yield (
                f"{key}={folder}: the reference runs in the policy's own architecture, but in its config.json "
                f"{'; '.join(found[:3])}{more}; give a checkpoint of the policy's architecture, or distil from it as "
                "algorithm.teacher_path"
            )
    else:
        yield from (f"{key}={folder}: {line}" for line in _model_problems(recipe, config, other))
    yield from _tokenizer_problems(recipe, key, folder)


def _model_problems(recipe: Recipe, config: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """What keeps the teacher's model from running on the policy's topology, beyond what is said of the policy."""
    for rule in (
        lambda given: topology_problems(recipe.topology, given),
        lambda given: latent_packing_problems(recipe, given),
        lambda given: precision_problems(recipe, given),
    ):
        said = set(rule(config))
        yield from (line for line in rule(other) if line not in said)
    if other["vocab_size"] < config["vocab_size"]:
        yield (
            f"its vocabulary has {other['vocab_size']} tokens, the policy's {config['vocab_size']}, of which it could not "
            "score the last; choose a teacher with the policy's vocabulary"
        )
    positions = other.get("max_position_embeddings")
    if other.get("model_type") != "nemotron_h" and isinstance(positions, int) and recipe.model.max_length > positions:
        yield (
            f"it has {positions} positions (max_position_embeddings), found model.max_length={recipe.model.max_length}; "
            f"set model.max_length={positions} or less"
        )


def _tokenizer_problems(recipe: Recipe, key: str, folder: Path) -> Iterator[str]:
    """A teacher must show that its ids mean what the policy's mean; a reference that brings a tokenizer, too."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if key == "algorithm.teacher_path":
            yield f"{key}={folder}: tokenizer.json is missing, its ids cannot be compared with the policy's; save it there"
        return
    own = Path(recipe.model.path) / "tokenizer.json"
    ours, theirs = _ids(own), _ids(path)
    if ours is None or theirs is None:
        yield (
            f"{key}={folder}: {own if ours is None else path} has no vocabulary to compare ids by; save the tokenizer "
            "there again"
        )
        return
    differ = [token for token, index in ours.items() if theirs.get(token) != index]
    if differ:
        token = min(differ, key=lambda token: ours[token])
        yield (
            f"{key}={folder}: its tokenizer is another: {token!r} is id {theirs.get(token)} there and {ours[token]} in the "
            f"policy's ({len(differ)} of {len(ours)} tokens differ); choose a model with the policy's tokenizer"
        )


def _ids(path: Path) -> dict[str, int] | None:
    """Token -> id of a tokenizer.json, added tokens included; None where it is no tokenizer of this format."""
    tokenizer, _ = _read(path)
    if tokenizer is None:
        return None
    try:
        vocab = tokenizer["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}
        return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError):
        return None


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """A file's JSON object, or None and why not."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return None, f"cannot be read ({(error.strerror or str(error)).lower()})"
    except ValueError as error:
        return None, f"is not valid JSON ({error})"
    return (found, "") if isinstance(found, dict) else (None, f"holds a {type(found).__name__}, not an object")
