"""How an engine process is started: the vLLM arguments and the environment that a recipe means.

Knows vLLM's flags, not its Python: nothing of vLLM is imported here. The process itself is `app/engine.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from megatron_agentrl.recipe.schema import Dtype, Recipe
from megatron_agentrl.rollout import auth, lifetime

#: Name under which every engine serves the policy.
SERVED_NAME = "policy"
#: Name of our weight-transfer backend (rollout/extension.py registers it).
TRANSFER_BACKEND = "megatron_agentrl"
#: Layer kinds that keep a recurrent state, for which vLLM's prefix cache is unsound on a CPU and experimental on GPUs.
_RECURRENT_LAYERS = {"linear_attention", "mamba", "mamba2", "M"}


class EngineSpec(msgspec.Struct, frozen=True):
    """One engine replica. `load_folder_weights` False: placeholder weights, version `none` until the first publish."""

    name: str
    model: str
    host: str
    port: int
    dtype: str = "float32"
    tp: int = 1
    max_length: int = 4096
    max_num_seqs: int = 128
    max_batched_tokens: int = 8192
    kv_cache_bytes: int = 1 << 30
    gpu_memory_utilization: float = 0.9
    threads: int = 1
    seed: int = 0
    cuda: bool = False
    load_folder_weights: bool = False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def spec_from_recipe(
    recipe: Recipe, index: int, host: str, port: int, *, model: str | None = None, load_folder_weights: bool = False
) -> EngineSpec:
    """The spec of replica `index`. `model` replaces `recipe.model.path` (an exported folder, for `eval` and `serve`)."""
    return EngineSpec(
        name=f"engine-{index}",
        model=model or recipe.model.path,
        host=host,
        port=port,
        dtype={Dtype.fp32: "float32", Dtype.bf16: "bfloat16", Dtype.fp16: "float16"}[recipe.rollout.dtype],
        tp=recipe.rollout.tp,
        max_length=recipe.model.max_length,
        max_num_seqs=recipe.rollout.max_num_seqs,
        max_batched_tokens=recipe.rollout.max_batched_tokens,
        kv_cache_bytes=int(recipe.rollout.kv_cache_gib * (1 << 30)),
        gpu_memory_utilization=recipe.rollout.gpu_memory_utilization,
        threads=recipe.rollout.threads,
        seed=recipe.seed + index,  # replicas must not sample alike
        cuda=runs_on_gpu(recipe.rollout.engine),
        load_folder_weights=load_folder_weights,
    )


def runs_on_gpu(engine: str) -> bool:
    """What `rollout.engine` means on this machine. Raises ValueError for an unknown name."""
    if engine not in ("auto", "vllm", "vllm-cpu"):
        raise ValueError(f"rollout.engine is {engine!r}; expected auto, vllm or vllm-cpu")
    return engine == "vllm" or (engine == "auto" and Path("/dev/nvidiactl").exists())


def arguments(spec: EngineSpec) -> list[str]:
    """vLLM API-server arguments of `spec`."""
    args = {
        "--model": spec.model,
        "--served-model-name": SERVED_NAME,
        "--host": spec.host,
        "--port": str(spec.port),
        "--dtype": spec.dtype,
        "--seed": str(spec.seed),
        "--tensor-parallel-size": str(spec.tp),
        "--max-model-len": str(spec.max_length),
        "--max-num-seqs": str(spec.max_num_seqs),
        "--max-num-batched-tokens": str(spec.max_batched_tokens),
        # Sampling comes from the request alone, never from the model folder's generation_config.json.
        "--generation-config": "vllm",
        # The logprobs of the distribution that was sampled from (after temperature).
        "--logprobs-mode": "processed_logprobs",
        "--load-format": "auto" if spec.load_folder_weights else "dummy",
        "--worker-extension-cls": "megatron_agentrl.rollout.extension.WorkerExtension",
        "--weight-transfer-config": json.dumps({"backend": TRANSFER_BACKEND}),
        "--middleware": f"{auth.__name__}.{auth.BearerToken.__name__}",
        "--uvicorn-log-level": "warning",
    }
    flags = ["--enforce-eager", "--enable-scale-out", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    flags += ["--disable-fastapi-docs", "--disable-log-stats"]
    recurrent = has_recurrent_layers(spec.model)
    flags.append("--no-enable-prefix-caching" if recurrent else "--enable-prefix-caching")
    if spec.cuda:
        args["--gpu-memory-utilization"] = str(spec.gpu_memory_utilization)
    else:
        if not recurrent:
            # Only whole blocks are shared, and vLLM's blocks of 128 tokens on a CPU hold most prompts of this size.
            args["--block-size"] = "32"
        # An explicit size also spares vLLM's profiling run.
        args["--kv-cache-memory-bytes"] = str(spec.kv_cache_bytes)
        if spec.tp == 1:
            # By class path, since vLLM turns "uni" into "mp" on a CPU: no worker process of its own, which would
            # import vLLM once more and exchange every step's inputs and outputs with the scheduler's process.
            args["--distributed-executor-backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return [*(part for pair in args.items() for part in pair), *flags]


def environment(spec: EngineSpec, token: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of the engine process: `base` (default: this process's) and what the engine needs on top."""
    env = dict(os.environ if base is None else base)
    env |= {
        auth.TOKEN_ENV: token,
        lifetime.ENV: "1",
        "VLLM_SERVER_DEV_MODE": "1",  # routes for pause, weight transfer and worker calls
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": env.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.cuda:
        return env
    env |= {
        "VLLM_TARGET_DEVICE": "cpu",
        "OMP_NUM_THREADS": str(spec.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",  # eager anyway; spares compile-cache noise
    }
    if spec.tp == 1:
        env["MEGATRON_AGENTRL_FORK_ENGINE"] = "1"
        env["LD_PRELOAD"] = ":".join([*_preloads(), *filter(None, [env.get("LD_PRELOAD")])])
    return env


def _preloads() -> list[str]:
    """What vLLM preloads into processes it spawns: tcmalloc (if its wheel brings it) and torch's OpenMP runtime."""
    found: list[str] = []
    for package, patterns in (
        ("vllm", ["libs/libtcmalloc*.so*"]),
        ("torch", ["../torch.libs/libgomp*", "lib/libgomp*"]),
    ):
        module = importlib.util.find_spec(package)
        if module is None or module.origin is None:
            raise ModuleNotFoundError(f"the engine needs {package}, which is not installed (see docs/install.md)")
        folder = Path(module.origin).parent
        found += [str(path.resolve()) for pattern in patterns for path in sorted(folder.glob(pattern))[:1]][:1]
    return found


def has_recurrent_layers(model: str) -> bool:
    """Whether the model folder's config names Mamba or other linear-attention layers."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    keys = ("hybrid_override_pattern", "layers_block_type", "layer_types")  # letters, or names, or null
    return bool(_RECURRENT_LAYERS & {kind for key in keys for kind in config.get(key) or ()})


def command(spec: EngineSpec) -> list[str]:
    """Command line of the engine process. -P: a module in the working directory must not shadow vLLM's imports."""
    return [sys.executable, "-P", "-m", "megatron_agentrl.app.engine", "--spec", msgspec.json.encode(spec).decode()]


def start(spec: EngineSpec, token: str, log: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
    """Starts the engine process; it ends with the calling *thread* at the latest. `log` takes stdout and stderr."""
    errors = None if log is None else subprocess.STDOUT
    return subprocess.Popen(command(spec), env=environment(spec, token), stdout=log, stderr=errors)
