"""The whole tree, and the checks that span sections."""

import hashlib
import json
from typing import Any

from pydantic import Field, model_validator

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.engine import (
    MIN_VLLM_TEMPERATURE,
    EngineConfig,
    HFEngineConfig,
    SamplingConfig,
    VllmEngineConfig,
)
from asyncrl.config.section import Section
from asyncrl.config.sections import (
    BrokerConfig,
    CheckpointConfig,
    EvalConfig,
    HostConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    ScoringConfig,
    TelemetryConfig,
    WeightsConfig,
)
from asyncrl.config.tasks import TaskConfig

_ADAPTER = {"rank", "alpha", "target_modules"}
"""What an adapter is; the rest of its section says how it is served."""


class RunConfig(Section):
    """One run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = Field(0, ge=0, lt=2**63)
    run_dir: str = ""
    """Folder of this run's records; "" makes runs/<name>-<time>."""

    model: ModelConfig
    task: TaskConfig
    pipeline: PipelineConfig = PipelineConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = HFEngineConfig()
    scoring: ScoringConfig = ScoringConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    broker: BrokerConfig = BrokerConfig()
    host: HostConfig = HostConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> "RunConfig":
        if self.sampling.top_p != 1.0 or self.sampling.top_k != 0:
            raise ValueError(
                f"sampling.top_p={self.sampling.top_p}, sampling.top_k={self.sampling.top_k}: "
                "training needs the full support (top_p=1, top_k=0), because the learner's log-probs "
                "are over the whole vocabulary; truncate only in eval.sampling"
            )
        if self.pipeline.group_size > self.engine.max_concurrent_completions:
            raise ValueError(
                f"pipeline.group_size={self.pipeline.group_size} does not fit "
                f"engine.max_concurrent_completions={self.engine.max_concurrent_completions}"
            )
        if self.eval.samples_per_prompt > self.engine.max_concurrent_completions:
            raise ValueError(
                f"eval.samples_per_prompt={self.eval.samples_per_prompt} does not fit "
                f"engine.max_concurrent_completions={self.engine.max_concurrent_completions}"
            )
        longest = self.engine.max_prompt_tokens + self.engine.max_completion_tokens
        if longest > self.learner.micro_batch_tokens:
            raise ValueError(
                f"engine.max_prompt_tokens + engine.max_completion_tokens = {longest} exceeds "
                f"learner.micro_batch_tokens={self.learner.micro_batch_tokens}"
            )
        if self.algorithm.num_minibatches > self.pipeline.groups_per_step:
            raise ValueError(
                f"algorithm.num_minibatches={self.algorithm.num_minibatches} does not fit "
                f"pipeline.groups_per_step={self.pipeline.groups_per_step}; an update takes whole groups"
            )
        if not self.is_loopback and not self.broker.token_path:
            raise ValueError(
                f"broker.address={self.broker.address!r} is reachable from other hosts and "
                "broker.token_path is empty; name a file with a shared key"
            )
        if not self.is_loopback and self.weights.host.startswith(("127.", "localhost")):
            raise ValueError(
                f"broker.address={self.broker.address!r} is for several hosts, and weights.host="
                f"{self.weights.host!r} would send their generators to themselves for weights; set "
                "it to the address of the learner's host"
            )
        if not self.is_loopback and self.must_probe:
            raise ValueError(
                f'engine.engines_per_gpu="auto" is measured by `asyncrl run` for its own host, and '
                f"broker.address={self.broker.address!r} is for several; set the number that "
                "`asyncrl probe` prints on one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_advantage(self) -> "RunConfig":
        advantage, pipeline = self.algorithm.advantage, self.pipeline
        if pipeline.group_size < 2 and advantage != "raw":
            raise ValueError(
                f"pipeline.group_size={pipeline.group_size} gives a group baseline nothing to "
                f"compare with (algorithm.advantage={advantage!r}); use 2 or more"
            )
        if pipeline.zero_signal == "drop" and advantage == "raw":
            raise ValueError(
                'pipeline.zero_signal="drop" throws away groups of equal scores, which '
                'algorithm.advantage="raw" learns from; use "keep"'
            )
        buffer = self.algorithm.overlong_buffer_tokens
        if buffer > self.engine.max_completion_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens={buffer} exceeds "
                f"engine.max_completion_tokens={self.engine.max_completion_tokens}"
            )
        if buffer > 0 and advantage == "max_rl":
            raise ValueError(
                f"algorithm.overlong_buffer_tokens={buffer} makes scores negative, and "
                'algorithm.advantage="max_rl" divides by their mean'
            )
        return self

    @model_validator(mode="after")
    def _check_temperatures(self) -> "RunConfig":
        for name, sampling in (("sampling", self.sampling), ("eval.sampling", self.eval.sampling)):
            if self.engine.kind == "vllm" and sampling.temperature < MIN_VLLM_TEMPERATURE:
                raise ValueError(
                    f"{name}.temperature={sampling.temperature}: vLLM samples at temperature >= "
                    f"{MIN_VLLM_TEMPERATURE}; greedy evaluation is eval.sampling.top_k=1"
                )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> "RunConfig":
        if self.lora.rank and self.lora.serving == "pinned" and self.engine.kind != "vllm":
            raise ValueError(
                f'lora.serving="pinned" needs an engine that runs several adapters in one batch, and '
                f'engine.kind={self.engine.kind!r} has one set of weights; use lora.serving="merged" '
                'or engine.kind="vllm"'
            )
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach the broker."""
        return self.broker.address.startswith(
            ("tcp://127.", "tcp://localhost", "tcp://[::1]", "ipc://")
        )

    @property
    def must_probe(self) -> bool:
        """Whether the number of engines on a GPU is still to be measured."""
        return isinstance(self.engine, VllmEngineConfig) and self.engine.engines_per_gpu == "auto"

    @property
    def engines_per_place(self) -> int:
        """Generator processes on the same GPUs; 1 while that is to be measured."""
        engine = self.engine
        if isinstance(engine, VllmEngineConfig) and engine.engines_per_gpu != "auto":
            return engine.engines_per_gpu
        return 1

    @property
    def num_engines(self) -> int:
        """Generator processes that `asyncrl run` starts."""
        return self.pipeline.num_generators * self.engines_per_place

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which a peer is lost."""
        return self.broker.beat_s * self.broker.max_missed_beats

    def without_resume(self) -> "RunConfig":
        """The same run from its beginning: what a run folder keeps, so that it can be repeated."""
        section = self.checkpoint.model_copy(update={"resume": False})
        return self.model_copy(update={"checkpoint": section})

    @property
    def lineage(self) -> str:
        """Hash of what a resumed run must have in common with its checkpoint.

        Model, task and seed, and what the adapter is; not how it is served.
        """
        shared: dict[str, bool | set[str]] = {"model": True, "task": True, "seed": True}
        if self.lora.rank:
            shared["lora"] = _ADAPTER
        return self._hash(include=shared)

    def lineage_settings(self) -> dict[str, Any]:
        """What `lineage` is a hash of, by dotted key; of an adapter that is off, its rank."""
        lora = _ADAPTER if self.lora.rank else {"rank"}
        tree = self.model_dump(
            mode="json", include={"model": True, "task": True, "seed": True, "lora": lora}
        )
        found = {"seed": tree.pop("seed")}
        for section, settings in tree.items():
            found |= {f"{section}.{key}": value for key, value in settings.items()}
        return found

    @property
    def digest(self) -> str:
        """Hash of everything that processes must agree on; 16 hex digits."""
        return self._hash(exclude={"run_dir", "telemetry", "host", "checkpoint"})

    def _hash(self, **which: set[str] | dict[str, bool | set[str]]) -> str:
        tree = self.model_dump(mode="json", **which)  # type: ignore[arg-type]
        text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
