"""What `asyncrl run` finds out about its settings before it makes a folder or starts a process.

Nothing here imports torch or an engine. What a task runs of other people's code, a scorer's file or a
data set's generator, runs in a scoring process (tasks/worker.py): with a deadline, and gone afterwards.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import JsonlTask, ReasoningGymTask, RunConfig, VllmEngineConfig
from asyncrl.extras import check_peft, check_vllm
from asyncrl.family import children, inherit_orphans, kill_orphans
from asyncrl.run_folder import check_model, read_key
from asyncrl.tasks import make_task
from asyncrl.tasks.jsonl import Jsonl
from asyncrl.tasks.scoring import ScoringPool


def check_settings(config: RunConfig) -> dict[str, int]:
    """Refuse what this host's processes would refuse only after some of them have loaded a model.

    Returns:
        How many rows of the task's file each split has; empty if its problems are made, not read.

    Raises:
        ConfigError: model, key, data or scorer are missing or broken, or a package is not installed.
    """
    if isinstance(config.engine, VllmEngineConfig):
        check_vllm()
    if config.lora.rank:
        check_peft(config.lora.rank)
    check_model(config)
    if config.broker.token_path:
        read_key(Path(config.broker.token_path))
    task = make_task(config.task, seed=config.seed)
    if isinstance(config.task, JsonlTask | ReasoningGymTask):
        check_scorer_starts(config)
    return task.num_rows if isinstance(task, Jsonl) else {}


def describe_rows(num_rows: dict[str, int], config: RunConfig) -> Iterator[str]:
    """Lines for the console: how a file was split, and whether an evaluation repeats its rows."""
    if not isinstance(config.task, JsonlTask):
        return
    held_out, asked = num_rows["held_out"], config.eval.num_prompts
    yield (
        f"data: {num_rows['train']} rows to train on, {held_out} held out "
        f"(task.held_out_fraction={config.task.held_out_fraction:g})"
    )
    if asked > held_out:
        least, more = divmod(asked, held_out)
        times = f"{least} or {least + 1}" if more else str(least)
        yield (
            f"  WARNING: an evaluation asks each held-out row {times} times "
            f"(eval.num_prompts={asked}): its score is of {held_out} rows"
        )


def check_scorer_starts(config: RunConfig) -> None:
    """Have one scoring process build the scorer, as those of a generator will.

    Raises:
        ConfigError: it cannot, or not within the time and memory that it has.
    """
    others = children(os.getpid())
    inherit_orphans()
    try:
        with ScoringPool(
            config.task,
            config.seed,
            num_workers=1,
            deadline_s=config.scoring.deadline_s,
            max_memory_bytes=config.scoring.max_memory_bytes,
        ) as pool:
            pool.await_ready()
    finally:
        kill_orphans(others)  # which a scorer's file may have started
        inherit_orphans(False)  # a supervisor asks for it again
