"""What the broker needs to know of the run, as plain values; times in seconds, sizes in bytes."""

from dataclasses import dataclass
from typing import Literal, Self

from asyncrl.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of the config under the same names, and the identity that peers must present."""

    run_id: str
    config_digest: str
    token: str = ""
    seed: int = 0

    groups_per_step: int
    max_staleness: int
    depth: int = 2**31
    group_size: int
    num_steps: int
    max_attempts: int = 3
    group_timeout_s: float = 600.0
    zero_signal: Literal["keep", "drop"] = "keep"
    max_zero_signal_in_a_row: int = 256
    no_progress_s: float = 900.0
    eval_every_steps: int = 0
    beat_s: float = 2.0
    silence_s: float = 30.0
    max_queue_bytes: int = 2**31

    @classmethod
    def from_config(cls, config: RunConfig, *, run_id: str, token: str) -> Self:
        """The broker's view of `config`."""
        pipeline = config.pipeline
        return cls(
            run_id=run_id,
            config_digest=config.digest,
            token=token,
            seed=config.seed,
            groups_per_step=pipeline.groups_per_step,
            max_staleness=pipeline.max_staleness,
            depth=pipeline.depth,
            group_size=pipeline.group_size,
            num_steps=pipeline.num_steps,
            max_attempts=pipeline.max_attempts,
            group_timeout_s=pipeline.group_timeout_s,
            zero_signal=pipeline.zero_signal,
            max_zero_signal_in_a_row=pipeline.max_zero_signal_in_a_row,
            no_progress_s=pipeline.no_progress_s,
            eval_every_steps=config.eval.every_steps,
            beat_s=config.broker.beat_s,
            silence_s=config.silence_s,
            max_queue_bytes=config.broker.max_queue_bytes,
        )
