"""What `asyncrl run` finds out about its settings before it makes a folder or starts a process.

Nothing here imports torch or an engine. What a task runs of other people's code, a scorer's file or a
data set's generator, runs in a scoring process (tasks/worker.py): with a deadline, and gone afterwards.
"""

import os
from pathlib import Path

from asyncrl.config import JsonlTask, ReasoningGymTask, RunConfig, VllmEngineConfig
from asyncrl.extras import check_peft, check_vllm
from asyncrl.family import children, inherit_orphans, kill_orphans
from asyncrl.run_folder import check_model, read_key
from asyncrl.tasks import make_task
from asyncrl.tasks.scoring import ScoringPool


def check_settings(config: RunConfig) -> None:
    """Refuse what this host's processes would refuse only after some of them have loaded a model.

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
    make_task(config.task, seed=config.seed)
    if isinstance(config.task, JsonlTask | ReasoningGymTask):
        check_scorer_starts(config)


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
