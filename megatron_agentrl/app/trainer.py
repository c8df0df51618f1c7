"""Entry point of one trainer rank: `python -m megatron_agentrl.app.trainer --run DIR --index RANK --mode train`.

Brings the parts together: the shims where there is no GPU, torch.distributed, the model from its Hugging Face
folder, and on rank 0 the clients of coordinator, gateway and engines. What the phases do is `trainer.loop`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from megatron_agentrl.launch.endpoints import Endpoints
from megatron_agentrl.observe.events import EventLog
from megatron_agentrl.observe.metrics import MetricsWriter
from megatron_agentrl.recipe.load import load_resolved
from megatron_agentrl.recipe.schema import Init


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--index", type=int, required=True, help="rank")
    parser.add_argument("--mode", choices=["train", "sft", "export"], default="train")
    args = parser.parse_args()
    recipe = load_resolved(args.run / "recipe.yaml")
    endpoints = Endpoints.read(args.run)

    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    host, port = endpoints.trainer_master.rsplit(":", 1)
    os.environ.update(
        RANK=str(args.index), LOCAL_RANK=str(args.index), WORLD_SIZE=str(recipe.topology.world),
        MASTER_ADDR=host, MASTER_PORT=port,
    )  # fmt: skip
    import torch

    torch.set_num_threads(recipe.topology.threads)
    if not torch.cuda.is_available():
        from megatron_agentrl.cpu import megatron as cpu_megatron

        cpu_megatron.install()
    from megatron_agentrl.data.encoded import EncodedDemonstrations
    from megatron_agentrl.rollout.weights_client import VllmEngine
    from megatron_agentrl.trainer import checkpoint, loop, model, optimizer, topology
    from megatron_agentrl.trainer.coordinator_client import CoordinatorClient
    from megatron_agentrl.trainer.random_init import write_random
    from megatron_agentrl.trainer.weights_io import load_hf
    from megatron_agentrl.weights.publish import Publisher
    from megatron_agentrl.weights.transport import GlooTransport

    rank = topology.init(recipe.topology, recipe.seed)
    source = Path(recipe.model.path)
    hf_config = json.loads((source / "config.json").read_text())
    events = EventLog(args.run, f"trainer-{args.index}")
    newest = checkpoint.newest(args.run / "checkpoints")
    resume_at = None if newest.path is None else newest.step
    if args.mode == "export" and newest.path is None:
        raise SystemExit(
            f"{args.run}: no complete checkpoint to export ({'; '.join(newest.skipped) or 'none was written'})"
        )
    t = loop.Trainer(recipe, args.run, rank, hf_config, [], _pad_id(hf_config), events)
    with events.span("load"):
        models = model.build(hf_config, recipe, rank)
        if resume_at is None:
            if recipe.model.init is Init.random:
                if rank.is_first:
                    write_random(args.run / "init", source, recipe.seed, heads=recipe.model.mtp.train)
                torch.distributed.barrier()
                source = args.run / "init"
            load_hf(models, hf_config, source, rank)
        t.models = optimizer.wrap(models, recipe.optimizer, recipe)
    if rank.is_first and args.mode != "export":
        t.metrics = MetricsWriter(args.run, recipe.observe.tensorboard, resume_at=resume_at)
        for reason in newest.skipped:
            print(f"checkpoint passed over: {reason}", flush=True)
    if rank.is_first and args.mode == "train":
        t.coordinator = CoordinatorClient(endpoints.coordinator, endpoints.token)
        engines = [VllmEngine(f"engine-{i}", url, endpoints.token) for i, url in enumerate(endpoints.engines)]
        t.publisher = Publisher(
            engines,
            GlooTransport(recipe.ports.host),
            tolerance=recipe.weights.canary_tolerance,
            deadline=recipe.weights.deadline,
            clear_cache=recipe.weights.clear_cache,
            on_state=_gateway_state(endpoints),
        )

    if args.mode == "export":
        assert newest.path is not None  # judged above
        checkpoint.load_weights(newest.path, t.models)
    elif resume_at is None and recipe.warm_start.steps:
        assert recipe.warm_start.data is not None
        with events.span("warm_start"):
            rows = EncodedDemonstrations(
                Path(recipe.warm_start.data), Path(recipe.model.path), recipe.seed, recipe.model.max_length
            )
            loop.warm_start(t, rows)
    if args.mode == "train":
        with events.span("engines"):
            for engine in engines if rank.is_first else []:
                engine.wait_ready(time.monotonic() + recipe.rollout.start_timeout)
        loop.reinforce(t, resume_at)
    loop.export(t, args.run / "export")
    events.close()
    topology.shutdown()


def _pad_id(hf_config: dict) -> int:
    """Any id in the vocabulary will do: padding stands after each row's end, behind a zero mask."""
    return hf_config.get("pad_token_id") or 0


def _gateway_state(endpoints: Endpoints):
    """Tells the gateway which engine may be given requests, under which version."""
    import httpx

    headers = {"Authorization": f"Bearer {endpoints.token}"}
    http = httpx.Client(base_url=endpoints.gateway, timeout=30, headers=headers, trust_env=False)
    urls = {f"engine-{i}": url for i, url in enumerate(endpoints.engines)}

    def tell(engine: str, state: str, version: int | None) -> None:
        http.put(
            f"/engines/{engine}", json={"url": urls[engine], "state": state, "version": version}
        ).raise_for_status()

    return tell


if __name__ == "__main__":
    main()
