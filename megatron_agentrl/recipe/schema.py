"""The recipe: every value a run can be given, typed and documented.

One dataclass per concern; the string below a field is its documentation (printed by
`megatron-agentrl recipe`). This module holds no logic and imports no torch: loading is
`recipe.load`, legality is `recipe.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Init(str, Enum):
    pretrained = "pretrained"
    random = "random"


class Dtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Fp8Format(str, Enum):
    e4m3 = "e4m3"
    hybrid = "hybrid"


class Fp8Recipe(str, Enum):
    delayed = "delayed"
    tensorwise = "tensorwise"
    blockwise = "blockwise"
    mxfp8 = "mxfp8"


class AmaxAlgorithm(str, Enum):
    max = "max"
    most_recent = "most_recent"


class GradientDtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class MasterDtype(str, Enum):
    fp32 = "fp32"
    fp16 = "fp16"


class MomentDtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Recompute(str, Enum):
    full = "full"
    selective = "selective"


class RecomputeMethod(str, Enum):
    uniform = "uniform"
    block = "block"


class Source(str, Enum):
    jsonl = "jsonl"
    reasoning_gym = "reasoning_gym"


class Advantage(str, Enum):
    rloo = "rloo"
    grpo = "grpo"
    mean = "mean"


class Proximal(str, Enum):
    behaviour = "behaviour"
    recomputed = "recomputed"


class Correction(str, Enum):
    truncate = "truncate"
    mask = "mask"


class OnFailure(str, Enum):
    stop = "stop"


class Schedule(str, Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Dispatcher(str, Enum):
    alltoall = "alltoall"
    allgather = "allgather"
    flex = "flex"


class FlexBackend(str, Enum):
    deepep = "deepep"
    hybridep = "hybridep"


@dataclass
class Mtp:
    """Multi-token-prediction heads of the checkpoint."""

    train: bool = False
    """Train the heads beside the policy, in the warm start and in reinforcement, on the same tokens. false keeps them
    as they are: they are not built, and an export carries them over."""
    loss_weight: float = 0.1
    """Weight of the heads' cross entropy (mean over the heads, per trained token) beside the policy's loss."""
    detach: bool = True
    """Keep the heads' gradient out of the policy: its hidden states, embeddings and output layer are constants to them."""


@dataclass
class Model:
    path: str = "???"
    """Hugging Face folder: config.json, tokenizer.json, chat template and (when `init=pretrained`) safetensors."""
    init: Init = Init.pretrained
    """`pretrained` reads the folder's safetensors; `random` draws weights from `seed` (the folder then needs none)."""
    dtype: Dtype = Dtype.fp32
    """Type the trainer computes in. `bf16` and `fp16` keep fp32 master weights; `fp16` scales the loss (`precision`)."""
    max_length: int = 4096
    """Longest sequence, in tokens, that engine and trainer accept."""
    mtp: Mtp = field(default_factory=Mtp)
    """Multi-token-prediction heads."""


@dataclass
class Topology:
    world: int = 1
    """Trainer processes (one per GPU; on a CPU one per process)."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    vpp: int = 1
    """Virtual pipeline stages per rank: the interleaved schedule, pp·vpp stages in all."""
    first_stage_layers: int | None = None
    """Layers of the first of the pp·vpp stages (the one with the embedding); null splits evenly. Layers are those of the
    hybrid model: an attention with its MLP is two."""
    last_stage_layers: int | None = None
    """Layers of the last of the pp·vpp stages (the one with the output layer and the loss); null splits evenly."""
    cp: int = 1
    """Context-parallel size."""
    ep: int = 1
    """Expert-parallel size."""
    etp: int | None = None
    """Expert-tensor-parallel size; null follows `tp`."""
    sequence_parallel: bool = False
    """Shard activations along the sequence inside tensor-parallel groups (needs tp > 1; experts with tp > 1 need it)."""
    tp_comm_overlap: bool = False
    """Overlap tensor-parallel communication with the matrix products (Transformer Engine, with sequence_parallel)."""
    dispatcher: Dispatcher = Dispatcher.alltoall
    """How tokens reach their experts: `alltoall`, `allgather` (every rank sees all tokens), or `flex` (fused kernels of
    `flex_backend`, GPUs only)."""
    flex_backend: FlexBackend = FlexBackend.deepep
    """Kernels of `dispatcher=flex`: `deepep` or `hybridep`."""
    distributed_optimizer: bool = True
    """Shard Adam's state (and a bf16 model's fp32 weights) over data-parallel ranks; false keeps all of it on each rank.
    SGD has no state and is never sharded."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass already runs (needs distributed_optimizer and
    overlap_grad_reduce)."""
    bucket_size: int | None = None
    """Parameters of one overlapped bucket; null takes 1,000,000 a data-parallel rank, at least 40,000,000."""
    threads: int = 1
    """CPU threads of each trainer process."""


@dataclass
class Precision:
    """Below `model.dtype`: FP8 through Transformer Engine, the types of the optimizer's state, fp16's loss scale."""

    fp8: Fp8Format | None = None
    """FP8 matrix products in the layers' linears: `e4m3` throughout, or `hybrid` (e5m2 for gradients). null turns it
    off. Needs Transformer Engine, model.dtype=bf16 and a GPU of compute capability 8.9 or later. Router, norms, scan,
    embedding and head are not touched."""
    fp8_recipe: Fp8Recipe = Fp8Recipe.tensorwise
    """Scaling: `tensorwise` (current amax of each tensor) and `delayed` (amax history) from 8.9, `blockwise` (128-wide
    blocks) from 9.0, `mxfp8` (32-wide blocks) from 10.0."""
    fp8_param_gather: bool = False
    """Keep the linears' weights in FP8 and gather them in FP8 over data-parallel ranks (masters stay fp32)."""
    fp8_amax_history: int = 1024
    """Steps of amax history (`delayed`)."""
    fp8_amax_algorithm: AmaxAlgorithm = AmaxAlgorithm.max
    """Which amax of the history sets the scale (`delayed`)."""
    fp8_margin: int = 0
    """Powers of two that the scale stays below the largest value (`delayed`)."""
    fp8_amax_tp_only: bool = False
    """Reduce amax over tensor and context parallel ranks only, not over data parallel ones (`delayed`, `tensorwise`)."""
    fp8_weight_gradient: bool = True
    """FP8 in the products that give weight gradients; false computes them in bf16 (`delayed`)."""
    fp8_attention: bool = False
    """FP8 inside dot-product attention too (`delayed`, `tensorwise`, `mxfp8`)."""
    fp8_head: bool = False
    """FP8 in the output head too (`mxfp8`)."""
    bf16_first_layers: int = 0
    """First entries of the layer pattern kept in bf16 under FP8 (attention and the experts after it are two entries)."""
    bf16_last_layers: int = 0
    """Last entries of the layer pattern kept in bf16 under FP8."""
    bf16_modules: str | None = None
    """Kinds of linears kept in bf16 under FP8, joined by commas: mamba, attention, mlp, experts, shared_experts,
    latent."""
    compute_capability: float | None = None
    """Compute capability of the trainers' GPUs, e.g. 9.0; null reads it from this machine's driver."""
    gradients: GradientDtype = GradientDtype.fp32
    """Type that gradients are summed over micro-batches and reduced over ranks in."""
    masters: MasterDtype = MasterDtype.fp32
    """Type of the optimizer's master weights; `fp16` needs Transformer Engine."""
    exp_avg: MomentDtype = MomentDtype.fp32
    """Type of Adam's first moment; other than fp32 needs Transformer Engine."""
    exp_avg_sq: MomentDtype = MomentDtype.fp32
    """Type of Adam's second moment; other than fp32 needs Transformer Engine."""
    loss_scale: float = 32768.0
    """First loss scale of an fp16 run. A step whose gradients overflow is repeated on the same batch at half the scale."""
    loss_scale_min: float = 1.0
    """An fp16 step that overflows at this scale ends the run."""
    loss_scale_window: int = 1000
    """Steps without overflow after which an fp16 run doubles its loss scale."""


@dataclass
class Memory:
    """What is traded for less memory on a trainer rank."""

    recompute: Recompute | None = None
    """Activations computed again in the backward pass: `full` (whole layers), `selective` (`recompute_modules`), or
    null (none)."""
    recompute_method: RecomputeMethod = RecomputeMethod.uniform
    """With `full`: `uniform` keeps the input of every `recompute_layers` layers, `block` recomputes the first
    `recompute_layers` layers of each stage and keeps everything of the others."""
    recompute_layers: int = 1
    """Layers (entries of the pattern) of a recomputed unit (`uniform`) or of the recomputed part (`block`)."""
    recompute_modules: str | None = None
    """With `selective`, joined by commas: core_attn, mlp, moe, moe_act, shared_experts, layernorm, mla_up_proj."""
    optimizer_offload: float = 0.0
    """Share of Adam's state and work that is moved to the host's memory and cores (GPU trainers)."""
    optimizer_offload_overlap: bool = True
    """Copy gradients and weights while the host's part of the step runs."""


@dataclass
class Optimizer:
    """Shared by the reinforcement phase (`optimizer`) and the warm start (`warm_start.optimizer`)."""

    name: str = "adam"
    """`adam` (decoupled weight decay) or `sgd`."""
    lr: float = 1e-6
    """Peak learning rate."""
    schedule: Schedule = Schedule.constant
    """Decay after the warm-up: `constant`, `linear` or `cosine`, down to `min_lr_fraction` at the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up; step k of them uses lr * k / warmup_steps."""
    min_lr_fraction: float = 0.0
    """Final learning rate as a fraction of `lr`."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.95
    """Adam's second-moment decay."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Global gradient-norm clip; 0 turns it off."""
    router_bias_rate: float = 0.0
    """Step of the aux-loss-free expert-bias update (sign rule); 0 freezes the bias."""


@dataclass
class WarmStart:
    steps: int = 0
    """Supervised steps before reinforcement; 0 skips the phase."""
    data: str | None = None
    """JSONL (optionally .gz) of demonstrations: {"messages": [...]}; assistant turns are trained on."""
    batch: int = 64
    """Demonstrations per optimizer step."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """Optimizer of the supervised phase."""


@dataclass
class Data:
    source: Source = Source.jsonl
    """Where prompts come from: `jsonl` files or a `reasoning_gym` task. Given on the command line, it drops the recipe
    file's own prompts, eval, task and sizes."""
    prompts: str | None = None
    """Training prompts (JSONL, optionally .gz): `prompt` or `messages`, `answer`, any other keys as metadata."""
    eval: str | None = None
    """Held-out prompts, same format. A training prompt that also stands here is refused."""
    task: str | None = None
    """reasoning-gym task name when `source=reasoning_gym`, e.g. chain_sum."""
    task_options: str | None = None
    """The task's own settings, e.g. min_terms=2,max_terms=2 for chain_sum; null leaves its defaults."""
    size: int = 4096
    """Training prompts to draw when `source=reasoning_gym`."""
    eval_size: int = 256
    """Held-out prompts to draw when `source=reasoning_gym`."""
    shuffle: bool = True
    """Shuffle the prompts anew each epoch (from `seed`)."""
    epochs: int | None = None
    """Stop after this many passes over the prompts; null repeats them for as long as steps remain."""
    train_remainder: bool = False
    """With `epochs`: train the groups that are left after the last full batch as one smaller batch."""


@dataclass
class Agent:
    cls: str = "megatron_agentrl.agent.builtin:SingleTurnAgent"
    """`module:Class` of the agent; it is given the task and a chat endpoint and returns a Result."""
    max_turns: int = 4
    """Policy turns after which a trajectory ends."""
    timeout: float = 120.0
    """Seconds one trajectory may take; then it counts as a failure of kind `timeout`."""
    concurrency: int = 256
    """Trajectories one worker process runs at once."""
    workers: int = 1
    """Agent worker processes."""
    retries: int = 2
    """How often a trajectory that failed for infrastructure reasons is asked again before it counts as failed."""


@dataclass
class Sampling:
    temperature: float = 1.0
    """Sampling temperature. The trainer divides its logits by the same number."""
    max_tokens: int = 512
    """Longest policy turn, in tokens."""
    max_response_tokens: int = 2048
    """Policy tokens a whole trajectory may hold."""


@dataclass
class Rollout:
    engine: str = "auto"
    """`vllm` (GPU), `vllm-cpu`, or `auto` (by what the machine has)."""
    replicas: int = 1
    """Engine replicas."""
    tp: int = 1
    """Tensor-parallel size of one engine replica."""
    dtype: Dtype = Dtype.fp32
    """Type the engine computes in."""
    max_num_seqs: int = 128
    """Sequences an engine decodes at once."""
    max_batched_tokens: int = 8192
    """Tokens an engine schedules in one step."""
    kv_cache_gib: float = 1.0
    """Key/value cache of a CPU engine in GiB."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that an engine on a GPU may take."""
    threads: int = 1
    """CPU threads of each engine process."""
    start_timeout: float = 300.0
    """Seconds an engine may take to come up."""
    request_timeout: float = 120.0
    """Seconds one generation request may take."""


class Order(str, Enum):
    admission = "admission"
    completion = "completion"


@dataclass
class Staleness:
    eta: int = 1
    """Largest allowed staleness: version a step starts from minus the version that sampled the token. 0 is synchronous."""
    order: Order = Order.admission
    """Which groups a batch takes: the oldest asked (`admission`: its composition does not depend on how long answers
    take) or the first finished (`completion`: no wait for stragglers, but short answers train first)."""


@dataclass
class Weights:
    canary_tolerance: float = 1e-4
    """Largest |trainer logprob − engine logprob| on the canary sequences for an update to be accepted."""
    canary_tokens: int = 48
    """Length of each canary sequence, in tokens."""
    clear_cache: bool = True
    """Recompute the caches of in-flight requests after an update (false keeps the old keys and values)."""
    deadline: float = 120.0
    """Seconds a whole publish may take."""


@dataclass
class Algorithm:
    advantage: Advantage = Advantage.rloo
    """Estimator over a group: `rloo`, `grpo` (mean and sample std) or `mean` (mean baseline only)."""
    group_size: int = 8
    """Trajectories per prompt."""
    clip_low: float = 0.2
    """PPO clip: ratio is kept above 1 − clip_low."""
    clip_high: float = 0.28
    """PPO clip: ratio is kept below 1 + clip_high."""
    proximal: Proximal = Proximal.behaviour
    """What the clipped ratio is taken against: the engine's logprobs, or the trainer's own at the start of the step."""
    importance_cap: float = 2.0
    """Largest token-level importance weight trainer/engine (with `proximal=recomputed`)."""
    importance_floor: float = 0.0
    """Smallest importance weight (with `proximal=recomputed`)."""
    correction: Correction = Correction.truncate
    """Importance weights outside [importance_floor, importance_cap] are brought to its border (`truncate`), or
    their tokens left out of the loss (`mask`). With `proximal=recomputed`."""
    dual_clip: float | None = None
    """Upper bound of a negative-advantage token's loss in units of |advantage| (above 1); null sets none."""
    kl_coef: float = 0.0
    """Weight of the k3 KL to the reference policy (the weights the reinforcement phase started from)."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy (nats a trained token, at the sampling temperature), which the loss then rewards."""
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards within the batch. Learning must vanish."""


@dataclass
class Train:
    steps: int = 100
    """Reinforcement steps (policy updates)."""
    batch: int = 16
    """Groups (prompts) per step."""
    micro_batch_tokens: int = 4096
    """Padded tokens (rows x longest row; with `packing` the packed row) one micro-batch may hold on a
    data-parallel rank. Under context parallelism its ranks share them."""
    packing: bool = False
    """Put a micro-batch's rows one after another into one row of tokens instead of padding each to the longest."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist in float32 at once while logprobs and their gradient are computed. Changes memory
    (3 x this x vocabulary / tp x 4 bytes at most), no number."""


@dataclass
class Eval:
    every: int = 20
    """Steps between held-out evaluations; 0 evaluates only before and after."""
    temperature: float = 1.0
    """Sampling temperature of the evaluation; 0 is greedy."""
    size: int | None = None
    """Held-out prompts to use; null takes all."""


@dataclass
class Checkpoint:
    every: int = 20
    """Steps between checkpoints (one is always written at the end); 0 writes only that one."""
    keep: int = 2
    """Newest checkpoints to keep."""
    asynchronous: bool = False
    """Write checkpoints in the background of the next steps: training stops while the state is copied to the host, no
    longer. The copy takes host memory until it is written."""


@dataclass
class Ports:
    host: str = "127.0.0.1"
    """IPv4 address or name of the interface that the run's own servers listen on."""
    coordinator: int = 0
    """Port of the coordinator; 0 picks a free one."""
    gateway: int = 0
    """Port of the gateway; 0 picks a free one."""
    engine: int = 0
    """Port of the first engine, the next replicas take the following ones; 0 picks free ones."""


@dataclass
class Deadlines:
    batch: float = 300.0
    """Seconds the trainer waits for a batch before the run ends, naming who is late."""
    start: float = 300.0
    """Seconds any process may take to report that it is ready."""
    stop: float = 10.0
    """Seconds a process may take to stop before it is killed."""
    eval: float = 300.0
    """Seconds one held-out evaluation may take."""
    checkpoint: float = 1800.0
    """Seconds that a checkpoint written in the background may take before the run ends, naming the ranks that are late."""


@dataclass
class Observe:
    tensorboard: bool = True
    """Write TensorBoard events beside the JSONL metrics."""
    live: bool | None = None
    """Draw the live panel (true) or print lines (false); null decides by whether stdout is a terminal."""


@dataclass
class Recipe:
    seed: int = 0
    """Seed of weights, data order and sampling controls."""
    run_root: str = "runs"
    """Folder that holds the run folders."""
    run_name: str | None = None
    """Name of the run folder (plain word); null takes the recipe's name."""
    on_failure: OnFailure = OnFailure.stop
    """What a dead process does to the run: `stop` ends it with the process's name and last log lines."""
    model: Model = field(default_factory=Model)
    topology: Topology = field(default_factory=Topology)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    optimizer: Optimizer = field(default_factory=Optimizer)
    warm_start: WarmStart = field(default_factory=WarmStart)
    data: Data = field(default_factory=Data)
    agent: Agent = field(default_factory=Agent)
    sampling: Sampling = field(default_factory=Sampling)
    rollout: Rollout = field(default_factory=Rollout)
    staleness: Staleness = field(default_factory=Staleness)
    weights: Weights = field(default_factory=Weights)
    algorithm: Algorithm = field(default_factory=Algorithm)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    ports: Ports = field(default_factory=Ports)
    deadlines: Deadlines = field(default_factory=Deadlines)
    observe: Observe = field(default_factory=Observe)
