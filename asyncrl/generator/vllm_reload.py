"""New weights into a running vLLM engine, however many workers it has; only while it is paused.

| engine           | offered                | how                                                      |
|------------------|------------------------|----------------------------------------------------------|
| one worker, in   | tensors, by reference  | vllm_direct.py                                           |
| this process     |                        |                                                          |
| several workers, | staged by every worker | one device copy of each worker's part (shard_staging.py) |
| each a process   | beside the decode      |                                                          |
|                  | in a file              | every worker maps it and loads its part (vllm_worker.py) |
|                  | in memory              | a file is made                                           |
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import nn
from vllm import LLMEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from asyncrl.generator.shard_staging import ShardedStaging
from asyncrl.generator.vllm_direct import DirectLoader
from asyncrl.generator.vllm_worker import as_arguments, shared_file
from asyncrl.weights.shared_file import SharedFile

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class Reloader:
    """Loads whole checkpoints into one engine's model."""

    def __init__(
        self, llm: LLMEngine, *, guard: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Nothing is loaded yet; `guard` is that of `ShardedStaging`."""
        # It warns at every reload of layers that have no weights of their own.
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        self._llm = llm
        self._guard = guard
        config = llm.vllm_config
        model = config.model_config
        self._is_parallel = config.parallel_config.world_size > 1
        self._may_be_direct = not (model.quantization or model.is_moe or model.use_mla)
        self._staging: ShardedStaging | None = None
        self._loader: DirectLoader | None = None
        if not self._is_parallel:
            [module] = llm.apply_model(lambda model: model)
            self._loader = DirectLoader(
                module, self._reload_layerwise, may_be_direct=self._may_be_direct
            )

    @property
    def direct(self) -> bool | None:
        """Whether the one worker loads directly; None before the first load, or if there are several."""
        return self._loader.direct if self._loader is not None else None

    def staging(self) -> ShardedStaging | None:
        """The way to every worker's device, to be used beside the decode; None if there is one worker."""
        if self._is_parallel and self._may_be_direct and self._staging is None:
            num_workers = self._llm.vllm_config.parallel_config.world_size
            with ExitStack() as undo:
                staging = ShardedStaging(num_workers, guard=self._guard)
                undo.callback(staging.close)
                arguments = (staging.directory, self._may_be_direct)
                self._llm.collective_rpc("open_staging", args=arguments)
                staging.connect()
                undo.pop_all()
            self._staging = staging
        return self._staging

    def load(self, tensors: Mapping[str, torch.Tensor], file: SharedFile | None) -> None:
        """Load tensors under their names on disk, from `file` if they are in one.

        Nothing is kept, but one worker's device may read them until it is synchronized. Without values
        (device "meta") they are those that `staging` has brought to the workers last.

        Raises:
            WeightMismatchError: the trial did damage that a reload does not repair; the model is lost.
        """
        if self._loader is not None:
            self._loader.load(tensors)
        elif self._staging is not None and all(values.is_meta for values in tensors.values()):
            self._llm.collective_rpc("load_staged", args=(self._staging.number,))
        else:
            with nullcontext(file) if file is not None else shared_file(tensors) as place:
                arguments = (*as_arguments(place), self._may_be_direct)
                self._llm.collective_rpc("load_from_file", args=arguments)
        if current_platform.is_cpu():
            self._llm.apply_model(repack_heads)

    def close(self) -> None:
        """Let go of the workers."""
        if self._staging is not None:
            self._staging.close()

    def _reload_layerwise(self, iterator: object) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})


def repack_heads(model: nn.Module) -> None:
    """On a CPU the head computes with a packed copy; reloading renews it only if it is not tied."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
