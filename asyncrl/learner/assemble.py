"""Builds a learner from a configuration and runs it; with several ranks, once in each of them."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from asyncrl.config import RunConfig
from asyncrl.errors import CheckpointError, ConfigError, in_a_line
from asyncrl.learner import checkpoint
from asyncrl.learner.controller import StalenessController
from asyncrl.learner.gradients import GradientSketch
from asyncrl.learner.inbox import Inbox
from asyncrl.learner.model import Policy, choose_dtype, shard
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.pieces import Pieces
from asyncrl.learner.probe import Prober
from asyncrl.learner.process import Learner, StartPoint
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.recorder import Recorder
from asyncrl.learner.reference import choose_reference
from asyncrl.telemetry.trace import Tracer, process_start_s
from asyncrl.weights.buffers import choose_transport
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import PublicationDtype, Snapshotter, named_weights, snapshot_bytes
from asyncrl.wire.mailbox import Mailbox
from asyncrl.wire.messages import Hello

log = logging.getLogger(__name__)


def run(config: RunConfig, *, endpoint: str, run_id: str, token: str, run_dir: Path) -> None:
    """Load model and checkpoint, join the broker at `endpoint` (rank 0), train to the end."""
    device = _device(config)
    # Others wait for rank 0 while it waits for a batch: their deadline must be the longer one.
    ranks = Ranks.join(
        rank=int(os.environ.get("RANK", "0")),
        world=int(os.environ.get("WORLD_SIZE", "1")),
        device_type=device.type,
        timeout_s=2 * config.pipeline.no_progress_s + config.eval.deadline_s,
    )
    found = _find_checkpoint(config, run_dir)
    torch.manual_seed(config.seed)
    policy, prober = _load(config, found, device)
    if ranks.mesh is not None:
        shard(policy, ranks.mesh)
    optimizer = Optimizer(policy, **_optimizer_settings(config))
    if found is not None:
        checkpoint.load_optimizer(found, optimizer)
    start = StartPoint(
        version=found.facts.version if found is not None else 0,
        epoch=found.facts.epoch + 1 if found is not None else 0,
        cursor=found.facts.cursor if found is not None else 0,
        resumed=found is not None,
    )
    tracer = _tracer(config, run_dir, ranks.rank)
    parts: dict[str, Any] = {
        "config": config, "run_dir": run_dir, "start": start, "ranks": ranks, "policy": policy,
        "optimizer": optimizer, "prober": prober, "tracer": tracer,
    } | _optional_parts(config, ranks, policy, optimizer)  # fmt: skip
    try:
        if ranks.rank == 0:
            _lead(config, endpoint, run_id, token, parts)
        else:
            _follow(config, parts)
    finally:
        tracer.close()
    ranks.leave()


def _load(
    config: RunConfig, found: checkpoint.Checkpoint | None, device: torch.device
) -> tuple[Policy, Prober | None]:
    """The policy, and what its first weights say; they are loaded one after the other."""
    prober = None
    if found is None or config.weights.canary:
        first = load_policy(config, None, device)
        prober = Prober.begin(first, config)
        if found is None:
            return first, prober
        del first
    return load_policy(config, found, device), prober


def load_policy(
    config: RunConfig, found: checkpoint.Checkpoint | None, device: torch.device
) -> Policy:
    """The policy of `found` or the initial one, whole, with its adapter if it has one.

    Raises:
        ConfigError: model.path or section lora does not fit.
        CheckpointError: the checkpoint's adapter is another one.
    """
    dtype = choose_dtype(config.learner.dtype, device)
    if not config.lora.rank:
        path = found.path if found is not None else config.model.path
        return Policy.load(path, device=device, compute_dtype=dtype)
    policy = Policy.load(config.model.path, device=device, compute_dtype=dtype)
    policy.adapt(config.lora, seed=config.seed, path=config.model.path)
    if found is not None and policy.adapter is not None:
        policy.adapter.load(found.path)
    return policy


def published_weights(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """What generators are given: the adapter alone, or the whole model."""
    return (
        list(policy.named_weights()) if policy.adapter is not None else named_weights(policy.model)
    )


def _lead(config: RunConfig, endpoint: str, run_id: str, token: str, parts: dict[str, Any]) -> None:
    """Rank 0: the broker's peer, the publisher, the record keeper; `parts` are those of every rank."""
    start: StartPoint = parts["start"]
    run_dir: Path = parts["run_dir"]
    weights, dtype = published_weights(parts["policy"]), publication_dtype(config, parts["policy"])
    transport = choose_transport(
        config.weights.transport,
        is_local=config.is_loopback,
        snapshot_bytes=snapshot_bytes(weights, dtype=dtype),
    )
    hello = Hello(
        role="learner", name="learner", run_id=run_id, config_digest=config.digest, token=token,
        epoch=start.epoch, version=start.version, cursor=start.cursor,
    )  # fmt: skip
    device = next(parts["policy"].parameters()).device
    mailbox = Mailbox(endpoint, hello, connect_timeout_s=config.host.start_timeout_s)
    try:
        publisher = Publisher(
            run_id,
            epoch=start.epoch,
            transport=transport,
            on_published=mailbox.send,
            host=config.weights.host,
            chunk_bytes=config.weights.chunk_bytes,
            token=token,
            device=device if device.type == "cuda" else None,
        )
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        recorder = Recorder(
            config, run_dir=run_dir, run_id=run_id, first_version=start.version,
            pieces=Pieces(tokenizer),
        )  # fmt: skip
        _mark_joined(run_dir)
        parts["tracer"].joined()
        try:
            Learner(
                tokenizer=tokenizer,
                inbox=Inbox(mailbox, parts["ranks"], no_progress_s=config.pipeline.no_progress_s),
                snapshotter=Snapshotter(weights, dtype=dtype, buffers=publisher.buffers),
                publisher=publisher,
                recorder=recorder,
                **parts,
            ).run()
        finally:
            recorder.close()
            publisher.close()
    finally:
        error = sys.exception()
        mailbox.close("trained" if error is None else in_a_line(error), failed=error is not None)


def _mark_joined(run_dir: Path) -> None:
    """Tell the supervisor that the learner has joined the run."""
    path = run_dir / "joined" / "learner"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _follow(config: RunConfig, parts: dict[str, Any]) -> None:
    """Another rank: the same steps on its share of each batch."""
    weights, dtype = published_weights(parts["policy"]), publication_dtype(config, parts["policy"])
    parts["tracer"].joined()
    Learner(
        tokenizer=None,
        inbox=Inbox(None, parts["ranks"], no_progress_s=config.pipeline.no_progress_s),
        snapshotter=Snapshotter(weights, dtype=dtype, buffers=None),
        publisher=None,
        recorder=None,
        **parts,
    ).run()


def _tracer(config: RunConfig, run_dir: Path, rank: int) -> Tracer:
    """This rank's, from the start of its process on."""
    name = "learner" if rank == 0 else f"learner-{rank}"
    path = run_dir / "trace" / f"{name}.jsonl" if config.telemetry.trace else None
    return Tracer(path, process=name, kind="learner", since_s=process_start_s())


def _optional_parts(
    config: RunConfig, ranks: Ranks, policy: Policy, optimizer: Optimizer
) -> dict[str, Any]:
    """What a run may or may not have, the same on every rank; fields of Learner."""
    found: dict[str, Any] = {"reference": choose_reference(config, policy, mesh=ranks.mesh)}
    if config.telemetry.grad_cosine:
        found["sketch"] = GradientSketch(optimizer.parameters.values())
    if config.pipeline.adaptive_staleness:
        found["controller"] = StalenessController(config.pipeline.max_staleness)
    return found


def publication_dtype(config: RunConfig, policy: Policy) -> PublicationDtype:
    """What generators compute in: publishing more bits than they keep would be waste."""
    if config.engine.dtype != "auto":
        return config.engine.dtype
    return "bfloat16" if policy.compute_dtype == torch.bfloat16 else "float32"


def _device(config: RunConfig) -> torch.device:
    """This rank's device.

    Raises:
        ConfigError: learner.device="cuda" without a GPU.
    """
    if config.learner.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('learner.device="cuda", but torch sees no GPU; use "auto" or "cpu"')
    if config.learner.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _find_checkpoint(config: RunConfig, run_dir: Path) -> checkpoint.Checkpoint | None:
    if not config.checkpoint.resume:
        return None
    found = checkpoint.latest(run_dir / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"checkpoint.resume=true, but {run_dir}/checkpoints holds no complete checkpoint"
        )
    if found.facts.lineage != config.lineage:
        raise CheckpointError(
            f"{found.path} was made with another model, task, seed or adapter (lineage "
            f"{found.facts.lineage}, this configuration has {config.lineage}); start a new run_dir, with "
            f"model.path={str(found.path)!r} (an adapter merged) if its weights shall be the initial ones"
        )
    log.info("resuming from %s at version %d", found.path, found.facts.version)
    return found


def _optimizer_settings(config: RunConfig) -> dict[str, Any]:
    return config.optimizer.model_dump(exclude={"max_skipped_steps"})
