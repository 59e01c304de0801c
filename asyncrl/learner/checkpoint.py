"""Saving and resuming: `version-000012/`, complete or absent.

| file                              | what                                                        |
|-----------------------------------|-------------------------------------------------------------|
| model*.safetensors, config.json   | the model as `from_pretrained` reads it, tokenizer included |
| adapter_model.safetensors,        | instead, with lora.rank > 0: the adapter as PEFT reads it;  |
| adapter_config.json               | its frozen model stays in model.path                        |
| optimizer.safetensors             | Adam's moments and step counts by parameter, torch's RNG    |
| checkpoint.json                   | the facts below, and size and CRC-32 of every other file    |

Everything is written to a temporary folder, synced, then renamed; only after that older checkpoints
are deleted. So a kill or a full disk at any moment leaves the one before. Weights that are not
finite are never saved. `latest` takes the newest folder whose files are all there with their
checksums, and says which ones it passed over. No file is ever unpickled.

With several ranks all must call `save` (each tensor is gathered in turn; rank 0 writes) and
`load_optimizer` (each reads the files and keeps its part).
"""

import json
import logging
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.errors import CheckpointError
from asyncrl.learner.model import Policy
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.ranks import Ranks

FACTS_FILE = "checkpoint.json"
OPTIMIZER_FILE = "optimizer.safetensors"
_NAME = re.compile(r"version-\d{6,}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What a run needs to know to go on."""

    version: int
    """Of the saved weights; the next step trains it."""

    epoch: int
    cursor: int
    """Ordinal of the first prompt that is not trained yet."""

    lineage: str
    """RunConfig.lineage: what may not change on resume."""

    run_name: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint; `Policy.load(path)` reads its weights, or `Adapter.load`."""

    path: Path
    facts: CheckpointFacts


class SavesPretrained(Protocol):
    """A tokenizer."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


def save(
    directory: Path,
    facts: CheckpointFacts,
    policy: Policy,
    optimizer: Optimizer,
    *,
    tokenizer: SavesPretrained,
    num_kept: int,
    ranks: Ranks,
) -> None:
    """Write `directory`/version-NNNNNN and keep the newest `num_kept` complete ones.

    Raises:
        CheckpointError: a weight is not finite, or the disk refused; older checkpoints are
        untouched.
    """
    weights = {name: _gather(value, ranks) for name, value in _weights(policy).items()}
    moments = _optimizer_tensors(optimizer, ranks)
    if ranks.rank == 0:
        broken = [name for name, value in weights.items() if not bool(value.isfinite().all())]
        if broken:
            raise CheckpointError(
                f"version {facts.version} is not saved: {broken[0]} and {len(broken) - 1} other "
                "tensors hold values that are not finite; older checkpoints are kept"
            )
        moments["rng/cpu"] = torch.get_rng_state()
        _write(directory, facts, policy, weights, moments, tokenizer)
        _prune(directory, num_kept)
    ranks.barrier()


def latest(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None; broken ones are passed over with a warning."""
    for path in _folders(directory):
        try:
            return Checkpoint(path, _verify(path))
        except CheckpointError as error:
            _log.warning("checkpoint passed over: %s", error)
    return None


def load_optimizer(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    """Restore Adam's state and torch's RNG; the next step is bit for bit the one without a stop.

    Raises:
        CheckpointError: it belongs to a model with other parameters.
    """
    with safe_open(checkpoint.path / OPTIMIZER_FILE, framework="pt") as file:
        stored = file.keys()
        names = {name.removeprefix("step/") for name in stored if name.startswith("step/")}
        unknown = names ^ set(optimizer.parameters) if names else set()
        if unknown:
            raise CheckpointError(
                f"{checkpoint.path}: the optimizer state is of another model; "
                f"{sorted(unknown)[0]!r} and {len(unknown) - 1} other parameters differ"
            )
        for name in names:
            parameter = optimizer.parameters[name]
            optimizer.adam.state[parameter] = {
                "step": file.get_tensor(f"step/{name}").to(parameter.device),
                "exp_avg": _place(file.get_tensor(f"exp_avg/{name}"), parameter),
                "exp_avg_sq": _place(file.get_tensor(f"exp_avg_sq/{name}"), parameter),
            }
        torch.set_rng_state(file.get_tensor("rng/cpu"))


def _weights(policy: Policy) -> dict[str, Tensor]:
    """What is trained, tied ones once, and the buffers that belong to a whole model's state."""
    weights: dict[str, Tensor] = {n: p.detach() for n, p in policy.named_weights()}
    if policy.adapter is not None:
        return weights
    tied = dict(policy.model.named_parameters(remove_duplicate=False))
    return weights | {n: v for n, v in policy.model.state_dict().items() if n not in tied}


def _optimizer_tensors(optimizer: Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in optimizer.parameters.items():
        # Empty before the first step, or for a parameter that never had a gradient.
        for key, value in optimizer.adam.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = _gather(value, ranks)
    return tensors


def _gather(value: Tensor, ranks: Ranks) -> Tensor:
    """The whole tensor on rank 0's host memory; the others keep nothing of it."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.cpu() if ranks.rank == 0 else whole.new_empty(0)


def _place(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that is laid out like `parameter`."""
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        # Every rank has read the same file: no need to talk.
        return distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return whole


def _write(
    directory: Path,
    facts: CheckpointFacts,
    policy: Policy,
    weights: dict[str, Tensor],
    moments: dict[str, Tensor],
    tokenizer: SavesPretrained,
) -> None:
    final = directory / f"version-{facts.version:06d}"
    temporary = directory / f".{final.name}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        policy.save(temporary, weights)
        tokenizer.save_pretrained(str(temporary))
        save_file(
            {name: value.contiguous() for name, value in moments.items()},
            temporary / OPTIMIZER_FILE,
        )
        table = {file.name: _seal(file) for file in sorted(temporary.iterdir())}
        content = json.dumps({"facts": asdict(facts), "files": table}, indent=1)
        (temporary / FACTS_FILE).write_text(content)
        _seal(temporary / FACTS_FILE)
        _sync(temporary)
        _set_aside(directory, facts.version)
        temporary.rename(final)
        _sync(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"version {facts.version} could not be saved in {directory}: {error}; "
            "older checkpoints are kept"
        ) from error


def _set_aside(directory: Path, version: int) -> None:
    """Rename what a history that was not resumed has left: folders of this version or later."""
    for path in _folders(directory):
        number = 0
        while path.exists() and _version(path) >= version:
            number += 1
            aside = path.with_name(f"set-aside-{path.name}-{number}")
            if not aside.exists():
                path.rename(aside)


def _verify(path: Path) -> CheckpointFacts:
    try:
        content = json.loads((path / FACTS_FILE).read_text())
        facts = CheckpointFacts(**content["facts"])
        for name, expected in content["files"].items():
            found = _measure(path / name)
            if found != expected:
                raise CheckpointError(f"{path / name} is {found}, expected {expected}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is incomplete: {error!r}") from error
    return facts


def _prune(directory: Path, num_kept: int) -> None:
    for path in _folders(directory)[num_kept:]:
        shutil.rmtree(path)


def _folders(directory: Path) -> list[Path]:
    """Checkpoint folders, newest version first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_version, reverse=True)


def _version(path: Path) -> int:
    return int(path.name.removeprefix("version-"))


def _measure(file: Path) -> dict[str, int]:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": file.stat().st_size, "crc32": checksum}


def _seal(file: Path) -> dict[str, int]:
    """Bring a file to the disk; its size and checksum."""
    _sync(file)
    return _measure(file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
