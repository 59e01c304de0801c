"""The plain sections: what has no variants."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.engine import SamplingConfig
from asyncrl.config.section import Section

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]


class ModelConfig(Section):
    """The model that is trained."""

    path: str
    """A Hugging Face id or a local directory that `from_pretrained` can load."""


class LoraConfig(Section):
    """Low-rank adapters: train a small update of each chosen matrix instead of the model (LoRA).

    W x + alpha / rank * B A x, with A [rank, in] random and B [out, rank] zero at the start, so that
    version 0 is model.path exactly (arXiv:2106.09685). There is no dropout: sampler and learner would
    compute different policies, and every ratio would be wrong.
    """

    rank: int = Field(0, ge=0, le=512)
    """0: off, all weights are trained. Adapters take about ten times the learning rate."""

    alpha: float = Field(32.0, gt=0.0)
    """The update is scaled by alpha / rank."""

    target_modules: Literal["all-linear"] | tuple[ModuleName, ...] = "all-linear"
    """The linear modules that get an adapter, by the end of their names (["q_proj", "v_proj"]);
    all-linear: every one but the output head."""

    serving: Literal["pinned", "merged"] = "pinned"
    """pinned (vllm): every version is an adapter of its own, completions end under the version that
    they began with. merged: added to the engine's weights; faster, with two more copies of these."""


class PipelineConfig(Section):
    """How generation and training are paced."""

    max_staleness: int = Field(2, ge=0)
    """k: no token is trained on more than this many versions after it was sampled. 0 is synchronous."""

    adaptive_staleness: bool = False
    """Lower the bound for new groups while sampler and learner drift apart, never above max_staleness
    (learner/controller.py)."""

    depth: int = Field(1, ge=1)
    """Steps' worth of groups that may be open: started and not yet taken by a step. 1 keeps groups
    fresh, so that a run does not sit at k; more keeps large engines full and hides long tails. Raise it
    when the learner waits for batches (time/wait_batch_s)."""

    groups_per_step: int = Field(8, ge=1)
    """Groups (prompts) that one optimizer step takes."""

    group_size: int = Field(8, ge=1)
    """Completions of one prompt."""

    num_steps: int = Field(20, ge=1)
    num_generators: int = Field(1, ge=1)
    """Places (GPUs, or groups of engine.tensor_parallel_size) that `asyncrl run` generates on, each with
    engine.engines_per_gpu generator processes; more may join from other hosts."""

    zero_signal: Literal["keep", "drop"] = "keep"
    """A group whose scores are all equal: train it (it only counts in N), or drop it, credit returned."""

    max_zero_signal_in_a_row: int = Field(256, ge=1)
    """With zero_signal="drop": the run ends when this many groups in a row carried no signal."""

    max_attempts: int = Field(3, ge=1)
    """Times a group may be started before its prompt is given up."""

    group_timeout_s: float = Field(600.0, gt=0)
    """A started group that is not finished by then is dropped and started again elsewhere."""

    no_progress_s: float = Field(900.0, gt=0)
    """The run ends with NoProgressError when no batch was completed for this long."""


class ScoringConfig(Section):
    """The pool of scoring processes beside each generator."""

    num_workers: int = Field(1, ge=1)
    deadline_s: float = Field(10.0, gt=0)
    """A verdict that takes longer is a timeout; its process is killed."""

    max_memory_bytes: int = Field(2**30, ge=2**26)
    """Address-space limit of a scoring process."""


class OptimizerConfig(Section):
    """AdamW with a constant rate after a linear warm-up."""

    learning_rate: float = Field(2e-5, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    max_grad_norm: float = Field(1.0, gt=0.0)
    num_warmup_steps: int = Field(0, ge=0)
    max_skipped_steps: int = Field(5, ge=1)
    """The run ends after this many steps in a row whose gradient was not finite."""


class LearnerConfig(Section):
    """How the learner computes."""

    num_ranks: int = Field(1, ge=1)
    """Learner processes (FSDP2 ranks) on this host."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast type of the forward pass; parameters, log-probs and optimizer state stay float32."""

    micro_batch_tokens: int = Field(2048, ge=16)
    """Padded tokens of one forward pass, prompts included."""

    share_prompts: bool = True
    """Compute a group's prompt once for all its completions (exact; a win for short completions)."""


class EvalConfig(Section):
    """The held-out evaluation."""

    every_steps: int = Field(5, ge=0)
    """Steps between evaluations; 0: only before and after training."""

    num_prompts: int = Field(64, ge=1)
    samples_per_prompt: int = Field(4, ge=1)
    sampling: SamplingConfig = SamplingConfig()
    deadline_s: float = Field(600.0, gt=0)
    """The evaluation after the last step may take this long."""


class WeightsConfig(Section):
    """How weights walk from learner to generators."""

    transport: Literal["auto", "shm", "tcp"] = "auto"
    """auto: shared memory when broker.address is of this host and /dev/shm has room, else tcp."""

    host: str = "127.0.0.1"
    """The learner's host as generators reach it (tcp); to be set when they are on other hosts."""

    chunk_bytes: int = Field(4 * 2**20, ge=2**10, le=2**26)
    chunks_in_flight: int = Field(8, ge=1)
    timeout_s: float = Field(60.0, gt=0)
    """A chunk that does not arrive by then is an error."""

    canary: bool = True
    """Compare engine and learner on a fixed sequence, before the first adoption and then after ever fewer
    of them; a generator whose log-probs are not the learner's ends the run (generator/canary.py)."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    every_steps: int = Field(50, ge=0)
    """0: only after the last step."""

    num_kept: int = Field(2, ge=1)
    resume: bool = False
    """Continue the run in `run_dir` from its newest complete checkpoint."""


class BrokerConfig(Section):
    """The rendezvous of all processes."""

    address: str = "tcp://127.0.0.1:*"
    """Where the broker binds; "*" picks a free port. Other hosts need an interface and token_path."""

    token_path: str = ""
    """File with the shared key that peers must present; required unless the address is loopback."""

    beat_s: float = Field(2.0, gt=0)
    max_missed_beats: int = Field(15, ge=2)
    """A peer silent for beat_s * max_missed_beats is lost; its groups go back to the queue."""

    max_queue_bytes: int = Field(2**31, ge=2**20)
    """Finished groups held in memory; beyond it no new group is admitted."""


class HostConfig(Section):
    """How local processes share this host."""

    pin_cores: bool = True
    """Give generators and learner disjoint cores (when both compute on the CPU)."""

    max_generator_restarts: int = Field(3, ge=0)
    start_timeout_s: float = Field(300.0, gt=0)
    """Every process must have joined this long after its own start; a probe may take as long."""


class TelemetryConfig(Section):
    """Where records go; metrics.jsonl and evals.jsonl are always written."""

    wandb: Literal["off", "online", "offline"] = "off"
    wandb_project: str = "asyncrl"
    wandb_group: str = ""
    """Runs that W&B shows together; a sweep sets it to its name."""

    trace: bool = True
    """What every process did when: trace/, for `asyncrl trace` and a run's overlap."""

    rollouts: bool = True
    """Every trained rollout with its text in rollouts.jsonl; off where texts are many or private."""

    alerts: Literal["warn", "stop", "off"] = "warn"
    """When a metric leaves its healthy range (telemetry/alerts.py): say so, end the run, or nothing."""

    num_detailed_groups: int = Field(2, ge=0)
    """Groups of a step of which rollouts.jsonl keeps every token (text, log-probs, weight), and dropped
    groups of a version of which drops.jsonl keeps the payload. More where runs are looked into token by
    token, 0 where completions are long and disk is short."""

    grad_cosine: bool = False
    """Compare each gradient with the one before it, over a sample of up to a million elements."""
