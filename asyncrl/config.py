"""The whole configuration: one frozen tree, one TOML file, dotted overrides.

Every process reads the same file and computes the same `digest`, which the handshake compares. Unknown
keys are errors that name the nearest known key; numbers that follow from others are properties.
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from asyncrl.config_algorithm import LOSS_KINDS, AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl.section import Section


class ModelConfig(Section):
    """The model that is trained."""

    path: str
    """A Hugging Face id or a local directory that `from_pretrained` can load."""


class ReverseDigitsTask(Section):
    """Reverse a list of digits; a difficulty ladder."""

    kind: Literal["reverse_digits"] = "reverse_digits"
    num_digits: int = Field(3, ge=2, le=32)
    num_examples: int = Field(1, ge=0, le=8)
    """Solved examples shown in the prompt; without one the packaged 135M model rambles."""


class ProductsTask(Section):
    """Multiply two numbers; the last integer of the answer counts."""

    kind: Literal["products"] = "products"
    num_digits: int = Field(1, ge=1, le=6)


class RepeatLetterTask(Section):
    """Toy task of `make smoke`: the score is the share of characters equal to the asked letter."""

    kind: Literal["repeat_letter"] = "repeat_letter"
    num_letters: int = Field(4, ge=2, le=26)


class ReasoningGymTask(Section):
    """A data set of the reasoning-gym package (extra `gym`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    params: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """Keyword arguments of the data set's generator."""

    min_score: float = Field(0.99, ge=0.0, le=1.0)
    """Scores under it count as 0, others as 1; 0 keeps the library's partial credit."""


class JsonlTask(Section):
    """Prompts and answers from a JSON-lines file, scored by a named scorer."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    """One object a line with `prompt` (text, or a list of chat messages) and `answer`."""

    scorer: str = "exact"
    """"exact", "last_integer", or "file.py:function" taking (prompt, completion, answer) by name."""

    held_out_fraction: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of the rows, chosen by content hash, that training never sees."""


TaskConfig = Annotated[
    ReverseDigitsTask | ProductsTask | RepeatLetterTask | ReasoningGymTask | JsonlTask,
    Field(discriminator="kind"),
]

_VARIANTS = {
    "reverse_digits", "products", "repeat_letter", "reasoning_gym", "jsonl", "hf", "vllm", *LOSS_KINDS,
}  # fmt: skip
"""Pydantic names the variant in the path of a fault; it is no part of the key."""


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
    """Generator processes that `asyncrl run` starts; more may join from other hosts."""

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


class SamplingConfig(Section):
    """How completions are sampled."""

    temperature: float = Field(1.0, gt=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 is off."""


class EngineSection(Section):
    """What every inference engine is asked for."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU or a CPU with bf16 instructions, float32 elsewhere."""

    max_concurrent_completions: int = Field(64, ge=1)
    """Completions decoded at the same time."""

    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are skipped and counted."""

    max_completion_tokens: int = Field(32, ge=1)


class HFEngineConfig(EngineSection):
    """The embedded engine over transformers, for CPU and GPU."""

    kind: Literal["hf"] = "hf"
    device: Literal["auto", "cpu", "cuda"] = "auto"


class VllmEngineConfig(EngineSection):
    """vLLM 0.26 to 0.33 (extra `vllm`), inside the generator's process."""

    kind: Literal["vllm"] = "vllm"
    gpu_memory_utilization: float = Field(0.85, gt=0.0, le=1.0)
    """Share of the GPU's memory for weights and KV cache; lower it when a learner shares the GPU."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that one engine is cut over."""

    cache_policy: Literal["keep", "recompute"] = "keep"
    """Running completions when weights are adopted: keep their KV cache (no cost; their stored log-probs
    stay exact, no single version reproduces them), or prefill them again (exact per version, seconds)."""

    enforce_eager: bool = False
    """Without compilation and CUDA graphs: starts in seconds, decodes several times slower."""

    quantization: Literal["none", "fp8"] = "none"
    """fp8: weights are quantized as they are loaded and adopted; bfloat16 on the wire. GPU only."""


_DEFAULT_KINDS = {"engine": "hf"}
"""Sections that may leave out `kind`, and what it then is."""


def _default_engine(value: object) -> object:
    return {"kind": _DEFAULT_KINDS["engine"]} | value if isinstance(value, dict) else value


EngineConfig = Annotated[
    HFEngineConfig | VllmEngineConfig,
    Field(discriminator="kind"),
    BeforeValidator(_default_engine),
]


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
    """Every process must have joined by then."""


class TelemetryConfig(Section):
    """Where records go; metrics.jsonl and rollouts.jsonl are always written."""

    wandb: Literal["off", "online", "offline"] = "off"
    wandb_project: str = "asyncrl"
    trace: bool = True
    alerts: Literal["warn", "stop", "off"] = "warn"
    """When a metric leaves its healthy range (telemetry/alerts.py): say so, end the run, or nothing."""

    grad_cosine: bool = False
    """Compare each gradient with the one before it, over a sample of up to a million elements."""


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

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach the broker."""
        return self.broker.address.startswith(
            ("tcp://127.", "tcp://localhost", "tcp://[::1]", "ipc://")
        )

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
        """Hash of what a resumed run must have in common with its checkpoint: model, task and seed."""
        return self._hash(include={"model", "task", "seed"})

    @property
    def digest(self) -> str:
        """Hash of everything that processes must agree on; 16 hex digits."""
        return self._hash(exclude={"run_dir", "telemetry", "host", "checkpoint"})

    def _hash(self, **which: set[str]) -> str:
        tree = self.model_dump(mode="json", **which)  # type: ignore[arg-type]
        text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, apply `section.key=value` overrides left to right, validate once.

    A value is parsed as TOML, and is a string if that fails. Setting a section's `kind` to another
    variant resets the section: settings of the old variant do not leak into the new one.

    Raises:
        ConfigError: no such file, not TOML, an override without "=", an unknown key, a bad value.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for item in overrides:
        _apply_override(tree, item)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error


def _apply_override(tree: dict[str, Any], item: str) -> None:
    dotted, equals, text = item.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"override {item!r} is not of the form section.key=value")
    *sections, key = dotted.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {item!r}: {section} is a value, not a section")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    if key == "kind" and node.get("kind", _DEFAULT_KINDS.get(".".join(sections))) != value:
        node.clear()
    node[key] = value


def _explain(error: ValidationError) -> str:
    """One line per fault: dotted path, what is wrong, and the nearest known key."""
    lines = []
    for fault in error.errors(include_url=False):
        path = ".".join(str(part) for part in fault["loc"] if part not in _VARIANTS)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            known = _known_keys()
            section, _, key = path.rpartition(".")
            beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
            close = difflib.get_close_matches(key, beside, n=1, cutoff=0.6)
            near = (
                [k for name, k in beside.items() if name in close or _initials(name) == key]
                or difflib.get_close_matches(path, known, n=1, cutoff=0.5)
                or difflib.get_close_matches(key, [k.split(".")[-1] for k in known], n=1)
            )
            hint = f"; did you mean {near[0]}?" if near else ""
            message = "unknown key" + (" for this kind" if path in known else hint)
        elif fault["type"] not in ("missing", "value_error"):
            message += f", got {fault['input']!r}"
        lines.append(f"{path}: {message}" if path else message)
    return "; ".join(lines)


def _initials(name: str) -> str:
    """The first letters, as other trainers call a key: lr for learning_rate."""
    return "".join(word[:1] for word in name.split("_"))


def _known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        variants = getattr(field.annotation, "__args__", (field.annotation,))
        for variant in variants:
            if isinstance(variant, type) and issubclass(variant, BaseModel):
                keys += _known_keys(variant, f"{prefix}{name}.")
    return keys


def to_toml(config: RunConfig) -> str:
    """The resolved tree as TOML, every key with its meaning as a comment; `read_config` reads it back."""
    top, sections = _section_toml(config, "")
    return "\n".join(top) + "\n" + "".join(sections)


def _section_toml(section: BaseModel, path: str) -> tuple[list[str], list[str]]:
    """Lines of plain keys, and the text of each subsection."""
    lines: list[str] = []
    subsections: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            inner = f"{path}.{name}" if path else name
            keys, deeper = _section_toml(value, inner)
            doc = (type(value).__doc__ or "").strip().splitlines()[0]
            subsections.append(f"\n[{inner}]  # {doc}\n" + "\n".join(keys) + "\n" + "".join(deeper))
            continue
        if field.description:
            lines += [f"# {text}" for text in field.description.splitlines()]
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) > 1:
            lines.append(f"# one of: {', '.join(map(str, get_args(field.annotation)))}")
        lines.append(f"{name} = {_toml_value(value)}")
    return lines, subsections


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in value.items())
        return "{ " + inner + " }" if inner else "{}"
    # JSON's scalars are TOML's, but for DEL, and for escapes of characters beyond U+FFFF.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
