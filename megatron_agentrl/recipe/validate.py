"""Whether a recipe can run: ranges, sizes that must divide, files, ports and the run folder. No torch, no processes.

`problems` yields one line for each thing that is wrong: what was found, what was expected, one way out. What needs
other rooms (contents of prompt files, memory) is checked by the command line beside this.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_agentrl.recipe import model_rules
from megatron_agentrl.recipe.errors import RecipeError, did_you_mean
from megatron_agentrl.recipe.frozen_rules import frozen_problems
from megatron_agentrl.recipe.leaves import get
from megatron_agentrl.recipe.memory_rules import memory_problems
from megatron_agentrl.recipe.mla_rules import latent_packing_problems, latent_problems
from megatron_agentrl.recipe.mtp_rules import mtp_problems
from megatron_agentrl.recipe.packing_rules import packing_problems
from megatron_agentrl.recipe.precision_rules import precision_problems
from megatron_agentrl.recipe.schema import Advantage, Init, Optimizer, Proximal, Recipe, Schedule, Source
from megatron_agentrl.recipe.topology_rules import data_parallel_problems, divisors, topology_problems
from megatron_agentrl.recipe.weight_files import weight_file_problems

MODES = ("train", "sft", "eval", "export")

#: Architectures that have a layout on all three sides (Hugging Face, Megatron-Core, engine), by `model_type`.
ARCHITECTURES = ("deepseek_v3", "nemotron_h", "qwen3_moe", "qwen3", "llama")

OPTIMIZERS = ("adam", "sgd")
ENGINES = ("auto", "vllm", "vllm-cpu")

#: Key -> (smallest, largest) allowed value; None is unbounded. A test holds that every numeric leaf is ruled.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, 2**31 - 1),
    "model.max_length": (2, None),
    "topology.world": (1, None),
    "topology.tp": (1, None),
    "topology.pp": (1, None),
    "topology.vpp": (1, None),
    "topology.first_stage_layers": (1, None),
    "topology.last_stage_layers": (1, None),
    "topology.bucket_size": (1, None),
    "topology.cp": (1, None),
    "topology.ep": (1, None),
    "topology.etp": (1, None),
    "topology.threads": (1, None),
    "precision.fp8_amax_history": (1, None),
    "precision.fp8_margin": (0, None),
    "precision.bf16_first_layers": (0, None),
    "precision.bf16_last_layers": (0, None),
    "precision.loss_scale_window": (1, None),
    "memory.recompute_layers": (1, None),
    "memory.optimizer_offload": (0.0, 1.0),
    "warm_start.steps": (0, None),
    "warm_start.batch": (1, None),
    "data.size": (1, None),
    "data.eval_size": (1, None),
    "data.epochs": (1, None),
    "agent.max_turns": (1, None),
    "agent.concurrency": (1, None),
    "agent.workers": (1, None),
    "agent.retries": (0, None),
    "sampling.max_tokens": (1, None),
    "sampling.max_response_tokens": (1, None),
    "rollout.replicas": (1, None),
    "rollout.tp": (1, None),
    "rollout.max_num_seqs": (1, None),
    "rollout.max_batched_tokens": (1, None),
    "rollout.gpu_memory_utilization": (0.01, 1.0),
    "rollout.threads": (1, None),
    "staleness.eta": (0, None),
    "weights.canary_tokens": (2, None),
    "algorithm.group_size": (1, None),
    "algorithm.clip_low": (0.0, 1.0),
    "algorithm.clip_high": (0.0, None),
    "algorithm.importance_floor": (0.0, None),
    "algorithm.kl_coef": (0.0, None),
    "algorithm.entropy_coef": (0.0, None),
    "algorithm.teacher_coef": (0.0, None),
    "train.steps": (1, None),
    "train.batch": (1, None),
    "train.micro_batch_tokens": (1, None),
    "train.logprob_chunk_tokens": (1, None),
    "eval.every": (0, None),
    "eval.temperature": (0.0, None),
    "eval.size": (1, None),
    "checkpoint.every": (0, None),
    "checkpoint.keep": (1, None),
    "ports.coordinator": (0, 65535),
    "ports.gateway": (0, 65535),
    "ports.engine": (0, 65535),
}
for _section in ("optimizer", "warm_start.optimizer"):
    RANGES |= {
        f"{_section}.warmup_steps": (0, None),
        f"{_section}.min_lr_fraction": (0.0, 1.0),
        f"{_section}.beta1": (0.0, 0.999999),
        f"{_section}.beta2": (0.0, 0.999999),
        f"{_section}.weight_decay": (0.0, None),
        f"{_section}.clip_grad": (0.0, None),
        f"{_section}.router_bias_rate": (0.0, None),
    }

#: Keys whose value must be greater than zero.
POSITIVE = (
    "model.mtp.loss_weight",
    "precision.compute_capability",
    "precision.loss_scale",
    "precision.loss_scale_min",
    "optimizer.lr",
    "optimizer.eps",
    "warm_start.optimizer.lr",
    "warm_start.optimizer.eps",
    "agent.timeout",
    "sampling.temperature",
    "rollout.kv_cache_gib",
    "rollout.start_timeout",
    "rollout.request_timeout",
    "weights.canary_tolerance",
    "weights.deadline",
    "algorithm.importance_cap",
    "algorithm.dual_clip",
    "deadlines.batch",
    "deadlines.start",
    "deadlines.stop",
    "deadlines.eval",
    "deadlines.checkpoint",
)


def validate(recipe: Recipe, mode: str = "train") -> None:
    """Raises RecipeError with one line for each problem."""
    found = list(problems(recipe, mode))
    if found:
        raise RecipeError("\n".join(found))


def problems(recipe: Recipe, mode: str = "train") -> Iterator[str]:
    """One line for each thing that keeps `recipe` from running in `mode` (train, sft, eval or export)."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}, expected one of {', '.join(MODES)}")
    out_of_range = list(_range_problems(recipe))
    yield from out_of_range
    if out_of_range:
        return  # what follows divides by these numbers
    config = None
    found = list(model_problems(recipe, weights=recipe.model.init is Init.pretrained or mode == "eval"))
    yield from found
    if not found:
        config = read_config(recipe.model.path)
    yield from topology_problems(recipe.topology, config)
    yield from data_parallel_problems(recipe)
    yield from packing_problems(recipe)
    yield from latent_packing_problems(recipe, config)
    yield from mtp_problems(recipe, config)
    if mode in ("train", "eval"):
        yield from latent_problems(config, on_cpu=not gpu_count() or recipe.rollout.engine == "vllm-cpu")
    yield from precision_problems(recipe, config)
    yield from memory_problems(recipe, config, gpu_count())
    yield from _machine_problems(recipe, mode)
    yield from _engine_problems(recipe, config)
    yield from _algorithm_problems(recipe)
    if mode == "train":
        yield from frozen_problems(recipe, config, _config_problems)
    yield from _length_problems(recipe)
    yield from _optimizer_problems(recipe.optimizer, "optimizer")
    if recipe.warm_start.steps:
        yield from _optimizer_problems(recipe.warm_start.optimizer, "warm_start.optimizer")
    yield from _data_problems(recipe, mode)
    yield from port_problems(recipe)
    yield from folder_problems(recipe)


def rank_problems(recipe: Recipe) -> Iterator[str]:
    """One line for each thing that keeps a rank of the recipe's topology from being built: ranges, config.json and
    the topology. Neither weights nor a tokenizer, data or as many GPUs are needed for that."""
    out_of_range = list(_range_problems(recipe))
    yield from out_of_range
    if out_of_range:
        return
    config = read_config(recipe.model.path)
    yield from _config_problems(Path(recipe.model.path), config)
    yield from topology_problems(recipe.topology, config)


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder; RecipeError where it is missing or no JSON object."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(
            f"model.path={folder}: {path} cannot be read ({error.strerror}); give a Hugging Face folder"
        ) from error
    except ValueError as error:
        raise RecipeError(f"{path}: not valid JSON ({error}); save the model's config again") from error
    if not isinstance(config, dict):
        raise RecipeError(f"{path}: found a {type(config).__name__}, expected a JSON object")
    return config


def _range_problems(recipe: Recipe) -> Iterator[str]:
    for key, (smallest, largest) in RANGES.items():
        value = get(recipe, key)
        if value is None:
            continue
        if smallest is not None and value < smallest:
            yield f"{key}={value}: expected at least {smallest}"
        elif largest is not None and value > largest:
            yield f"{key}={value}: expected at most {largest}"
    for key in POSITIVE:
        if (value := get(recipe, key)) is not None and not value > 0:
            yield f"{key}={get(recipe, key)}: expected more than 0"


# ---- model -----------------------------------------------------------------------------------------------------


def model_problems(recipe: Recipe, *, weights: bool) -> Iterator[str]:
    """Files of the model folder (safetensors too where `weights`), and an architecture that all three sides know."""
    folder = Path(recipe.model.path)
    if (what := _what_is(folder)) != "is a folder":
        yield f"model.path={folder}: {what}; expected a Hugging Face folder with config.json and tokenizer.json"
        return
    try:
        config = read_config(folder)
    except RecipeError as error:
        yield str(error)
        return
    yield from _config_problems(folder, config)
    if not (folder / "tokenizer.json").is_file():
        yield f"model.path={folder}: tokenizer.json is missing; save the tokenizer there (tokenizer.save_pretrained)"
    if not _has_chat_template(folder):
        yield (
            f"model.path={folder}: no chat template; expected chat_template.jinja or a chat_template in "
            "tokenizer_config.json"
        )
    if weights:
        yield from weight_file_problems(folder)
    positions = config.get("max_position_embeddings")
    if config.get("model_type") != "nemotron_h" and isinstance(positions, int) and recipe.model.max_length > positions:
        yield (
            f"model.max_length={recipe.model.max_length}: the model has {positions} positions "
            f"(max_position_embeddings); set model.max_length={positions} or less"
        )


#: Entries of a config.json that layout, planner and topology compute with, and the smallest value of each.
_SIZES = {
    name: smallest
    for smallest, names in (
        (1, "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"),
        (1, "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel decoder_sparse_step"),
        (1, "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_group topk_group"),
        (0, "first_k_dense_replace num_nextn_predict_layers"),
        (0, "intermediate_size moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size"),
        (0, "n_routed_experts n_shared_experts num_experts num_local_experts"),
    )
    for name in names.split()
}


def _size_problems(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    for name, smallest in _SIZES.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not smallest <= value < 2**31):
            yield f"{folder}/config.json: {name} is {value!r}, expected a whole number of at least {smallest}"
    pattern, layers = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if pattern is not None and not (isinstance(pattern, str) and set(pattern) <= set("M*E-")):
        yield f"{folder}/config.json: hybrid_override_pattern is {pattern!r}, expected a text of M, *, E and -"
    if layers is not None and not (isinstance(layers, list) and all(isinstance(layer, str) for layer in layers)):
        yield f"{folder}/config.json: layers_block_type is {layers!r}, expected a list of names"


def _config_problems(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    if config.get("model_type") not in ARCHITECTURES:
        yield (
            f"{folder}/config.json: model_type is {config.get('model_type')!r}, expected one of "
            f"{', '.join(ARCHITECTURES)}; choose a model of those"
        )
    else:
        sizes = list(_size_problems(folder, config))
        yield from sizes or (f"{folder}/{line}" for line in model_rules.model_problems(config))


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return False
    try:
        return bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))
    except (ValueError, AttributeError):
        return False


# ---- machine and engines ----------------------------------------------------------------------------------------


def gpu_names(devices: Path = Path("/dev")) -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them (without loading CUDA)."""
    count = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(count)]
    # CUDA takes the names up to the first that is none, e.g. -1.
    names = itertools.takewhile(lambda name: name and not name.startswith("-"), map(str.strip, visible.split(",")))
    return list(names)[:count]


def gpu_count() -> int:
    """How many GPUs this process may use."""
    return len(gpu_names())


def _machine_problems(recipe: Recipe, mode: str) -> Iterator[str]:
    world = recipe.topology.world if mode != "eval" else 0
    replicas, tp = recipe.rollout.replicas if mode in ("train", "eval") else 0, recipe.rollout.tp
    if gpus := gpu_count():
        needed = world + replicas * tp
        if needed > gpus:
            yield (
                f"topology.world: {world} trainers and rollout.replicas·tp = {replicas}·{tp} need {needed} GPUs, found "
                f"{gpus}; lower topology.world or rollout.replicas"
            )
        return
    cores = len(os.sched_getaffinity(0))
    if world > 4 * cores:
        yield (
            f"topology.world={world}: found {cores} CPU cores, expected at most 4 trainer processes a core; "
            f"set topology.world={4 * cores} or less"
        )
    if tp > 1:
        yield f"rollout.tp={tp}: found no GPU, an engine on a CPU is one process; set rollout.tp=1"


def _engine_problems(recipe: Recipe, config: dict[str, Any] | None) -> Iterator[str]:
    rollout = recipe.rollout
    if rollout.engine not in ENGINES:
        yield f"rollout.engine={rollout.engine}: {did_you_mean(rollout.engine, ENGINES)}"
    if rollout.engine == "vllm" and not gpu_count():
        yield "rollout.engine=vllm: found no GPU; set rollout.engine=vllm-cpu or auto"
    if rollout.max_batched_tokens < rollout.max_num_seqs:
        yield (
            f"rollout.max_batched_tokens={rollout.max_batched_tokens}: expected at least rollout.max_num_seqs = "
            f"{rollout.max_num_seqs} (one token a sequence)"
        )
    heads = (config or {}).get("num_attention_heads")
    if heads and heads % rollout.tp:
        yield f"rollout.tp={rollout.tp}: the model has {heads} attention heads; {divisors(heads)}"


# ---- algorithm, lengths, optimizer ------------------------------------------------------------------------------


def _algorithm_problems(recipe: Recipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if algorithm.group_size == 1 and algorithm.advantage is not Advantage.zero:
        needs = {
            Advantage.rloo: "rloo compares a trajectory with the others of its group",
            Advantage.grpo: "grpo divides by the standard deviation of the group",
            Advantage.mean: "mean subtracts the group's mean, so every advantage would be 0",
        }[algorithm.advantage]
        yield f"algorithm.group_size=1: {needs}; set algorithm.group_size=2 or more"
    if algorithm.proximal is Proximal.behaviour:
        default = type(algorithm)()
        for name in ("importance_cap", "importance_floor", "correction"):
            if (value := getattr(algorithm, name)) != getattr(default, name):
                yield (
                    f"algorithm.{name}={getattr(value, 'value', value)}: has no effect with algorithm.proximal=behaviour; "
                    "leave it out or set algorithm.proximal=recomputed"
                )
    if algorithm.importance_floor > algorithm.importance_cap:
        yield (
            f"algorithm.importance_floor={algorithm.importance_floor}: above algorithm.importance_cap = "
            f"{algorithm.importance_cap}; lower it"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip={algorithm.dual_clip}: expected a number above 1, or null"


def _length_problems(recipe: Recipe) -> Iterator[str]:
    sampling, longest = recipe.sampling, recipe.model.max_length
    if sampling.max_tokens >= longest:
        yield (
            f"sampling.max_tokens={sampling.max_tokens}: leaves no room for a prompt in model.max_length = {longest}; "
            f"set it below {longest}"
        )
    if sampling.max_response_tokens >= longest:
        yield (
            f"sampling.max_response_tokens={sampling.max_response_tokens}: leaves no room for a prompt in "
            f"model.max_length = {longest}; set it below {longest}"
        )
    if sampling.max_tokens > sampling.max_response_tokens:
        yield (
            f"sampling.max_tokens={sampling.max_tokens}: one turn may not hold more than a whole trajectory "
            f"(sampling.max_response_tokens = {sampling.max_response_tokens}); lower it"
        )
    if recipe.weights.canary_tokens > longest:
        yield (
            f"weights.canary_tokens={recipe.weights.canary_tokens}: longer than model.max_length = {longest}; lower it"
        )


def _optimizer_problems(optimizer: Optimizer, section: str) -> Iterator[str]:
    if optimizer.name not in OPTIMIZERS:
        yield f"{section}.name={optimizer.name}: expected one of {', '.join(OPTIMIZERS)}"
    default = Optimizer()
    if optimizer.name == "sgd":
        for name in ("beta1", "beta2", "eps"):
            if getattr(optimizer, name) != getattr(default, name):
                yield f"{section}.{name}={getattr(optimizer, name)}: has no effect with sgd; leave it out"
    if optimizer.schedule is Schedule.constant and optimizer.min_lr_fraction:
        yield (
            f"{section}.min_lr_fraction={optimizer.min_lr_fraction}: has no effect with {section}.schedule=constant; "
            "leave it out or choose linear or cosine"
        )


# ---- data ------------------------------------------------------------------------------------------------------


def _data_problems(recipe: Recipe, mode: str) -> Iterator[str]:
    data, warm_start = recipe.data, recipe.warm_start
    if mode == "sft" and not warm_start.steps:
        yield "warm_start.steps=0: the sft command runs the warm start only; set warm_start.steps"
    if warm_start.steps and mode in ("train", "sft"):
        if warm_start.data is None:
            yield f"warm_start.steps={warm_start.steps}: needs warm_start.data; give a demonstrations file"
        else:
            yield from _file_problems("warm_start.data", warm_start.data)
    if mode in ("sft", "export"):
        return
    if data.train_remainder and data.epochs is None:
        yield "data.train_remainder=true: has no effect without data.epochs; set data.epochs, or leave it out"
    if data.source is Source.jsonl:
        default = type(data)()
        for leaf in ("task", "task_options", "size", "eval_size"):
            if (value := getattr(data, leaf)) != getattr(default, leaf):
                yield f"data.{leaf}={value}: has no effect with data.source=jsonl; set data.source=reasoning_gym"
        if data.prompts is None:
            yield "data.prompts=null: data.source=jsonl needs a prompts file; set data.prompts=FILE.jsonl"
        if data.eval is None and mode == "eval":
            yield "data.eval=null: the eval command needs held-out prompts; set data.eval=FILE.jsonl"
        for key, name in (("data.prompts", data.prompts), ("data.eval", data.eval)):
            if name is not None:
                yield from _file_problems(key, name)
        return
    if data.task is None:
        yield "data.task=null: data.source=reasoning_gym needs a task, e.g. data.task=chain_sum"
    for key, name in (("data.prompts", data.prompts), ("data.eval", data.eval)):
        if name is not None:
            yield f"{key}={name}: has no effect with data.source=reasoning_gym; set {key}=null"


def _file_problems(key: str, name: str) -> Iterator[str]:
    if (what := _what_is(Path(name))) == "is a folder":
        yield f"{key}={name}: is a folder, expected a JSONL file"
    elif what == "does not exist":
        yield f"{key}={name}: no such file (looked from {Path.cwd()}); give an existing JSONL file"
    elif what != "is a file":
        yield f"{key}={name}: {what}; give a JSONL file that this user may read"
    elif not os.access(name, os.R_OK):
        yield f"{key}={name}: cannot be read by this user; change its permissions"


def _what_is(path: Path) -> str:
    """`is a folder`, `is a file`, `does not exist`, or why it cannot be told (no permission on the way, a long name)."""
    try:
        return "is a folder" if stat.S_ISDIR(path.stat().st_mode) else "is a file"
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be reached ({(error.strerror or str(error)).lower()})"


# ---- ports and the run folder -----------------------------------------------------------------------------------


def port_problems(recipe: Recipe) -> Iterator[str]:
    """Given ports that another process holds, that collide, or an interface that this machine lacks."""
    ports = recipe.ports
    owner: dict[int, str] = {}
    wanted = [("ports.coordinator", ports.coordinator), ("ports.gateway", ports.gateway)]
    if ports.engine:
        wanted += [("ports.engine", ports.engine + i) for i in range(recipe.rollout.replicas)]
    fault = _try_bind(ports.host, 0)
    if fault is not None:
        yield f"ports.host={ports.host}: this machine cannot listen there ({fault}); use an IPv4 address of its own"
        return
    for key, port in wanted:
        if port == 0:
            continue
        if port > 65535:
            yield f"{key}: replica ports reach {port}, expected at most 65535; set a lower first port"
        elif port in owner:
            yield f"{key}={port}: the same port as {owner[port]}; give each its own, or 0 for a free one"
        elif (fault := _try_bind(ports.host, port)) is not None:
            yield f"{key}={port}: the port on {ports.host} cannot be used ({fault}); stop its owner or set {key}=0"
        owner[port] = key


def _try_bind(host: str, port: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
        except UnicodeError as error:  # e.g. an empty part between two dots
            return str(error)
    return None


def folder_problems(recipe: Recipe) -> Iterator[str]:
    """Whether the run folder can be written: the nearest existing folder above it takes a file."""
    run_dir = Path(recipe.run_root) / (recipe.run_name or "run")
    way_out = "set run_root to a folder that you may write"
    existing, what = next(
        (path, what) for path in (run_dir, *run_dir.parents, Path()) if (what := _what_is(path)) != "does not exist"
    )
    if what != "is a folder":
        yield f"run_root={recipe.run_root}: {existing} {what}, expected a folder; {way_out}"
        return
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".write-test-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        yield f"run_root={recipe.run_root}: {existing} cannot be written ({(error.strerror or str(error)).lower()}); {way_out}"
