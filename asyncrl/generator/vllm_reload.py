"""New weights into a running vLLM model: straight into its parameters where that is proved right.

| way         | vLLM                                               | price                               |
|-------------|----------------------------------------------------|-------------------------------------|
| layerwise   | the worker's reload_weights(weights_iterator):     | each layer is rebuilt from the meta |
|             | right for every model, quantization and layout     | device: 130 ms for 30 layers (H200, |
|             |                                                    | 0.26), nearly all on the host       |
| direct      | none: the copies that the model's own load_weights | the copies, started by one call     |
|             | made once are made again (copy_plan.py)            |                                     |
| shared file | layerwise in every worker of a parallel engine,    | a copy, if what is offered is not   |
|             | which maps the file and loads its own shard        | in a file yet (merged adapters)     |

Invariant: what `load` leaves is what the layerwise way would leave. Direct is used only for a dense,
unquantized model in one worker, and only after a trial on the first load. The tensors are loaded
layerwise; a plan is recorded; then it is carried out on their negatives and on them as they are. The
former must have turned the sign of every element of every parameter, the latter must give back every
bit of the first. A loader that skips, repacks, moves, computes or fails does not pass.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn
from vllm import LLMEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from asyncrl.errors import WeightMismatchError
from asyncrl.generator.copy_plan import CopyPlan, record_copies
from asyncrl.generator.vllm_worker import as_arguments, shared_file
from asyncrl.weights.shared_file import SharedFile

log = logging.getLogger(__name__)

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"

Fingerprint = tuple[int, int]
"""Two sums over a tensor's bytes: plain, and each byte weighed by its place, so that moves show."""

_CHUNK = 2**22
_PRIME = 65521

_LOAD_ERRORS = (
    AttributeError, AssertionError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What a load_weights that is not made for a loaded model was seen to raise, and its like."""


class Reloader:
    """Loads whole checkpoints into one engine's model; only while it is paused."""

    def __init__(self, llm: LLMEngine) -> None:
        """Nothing is loaded yet."""
        # It warns at every reload of layers that have no weights of their own.
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        self._llm = llm
        config = llm.vllm_config
        self._is_parallel = config.parallel_config.world_size > 1
        model = config.model_config
        simple = not (self._is_parallel or model.quantization or model.is_moe or model.use_mla)
        self.direct: bool | None = None if simple else False
        """Whether loads are direct; None before the first."""

        self._plan: CopyPlan | None = None

    def load(self, tensors: Mapping[str, torch.Tensor], file: SharedFile | None) -> None:
        """Load tensors under their names on disk, from `file` if they are in one; nothing is kept.

        Raises:
            WeightMismatchError: the trial did damage that a reload does not repair; the model is lost.
        """
        if self._is_parallel:
            with nullcontext(file) if file is not None else shared_file(tensors) as place:
                self._llm.collective_rpc("reload_from_file", args=as_arguments(place))
        elif self.direct and self._plan is not None:
            self._plan.carry_out(tensors)
        else:
            self._load_layerwise(tensors)
            if self.direct is None:
                self._choose(tensors)
        if current_platform.is_cpu():
            self._llm.apply_model(repack_heads)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the caller may now overwrite what it offered

    def _load_layerwise(self, tensors: Mapping[str, torch.Tensor]) -> None:
        iterator = iter(tensors.items())
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})

    def _choose(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """After a layerwise load of `tensors`: set `direct`, and leave them loaded."""
        [right] = self._llm.apply_model(fingerprints)
        self.direct = self._try_direct(tensors, right)
        log.info("weights are adopted %s", "directly" if self.direct else "layer by layer")
        if not self.direct:
            self._plan = None
            self._load_layerwise(tensors)
            [found] = self._llm.apply_model(fingerprints)
            if found != right:
                raise WeightMismatchError(
                    "vLLM's load_weights of this architecture changed more than it loads "
                    f"({next(name for name in right if found[name] != right[name])!r}), and its "
                    "reload did not bring it back; use engine.kind='hf' for this model.path"
                )

    def _try_direct(
        self, tensors: Mapping[str, torch.Tensor], right: dict[str, Fingerprint]
    ) -> bool:
        if not all(values.is_floating_point() for values in tensors.values()):
            return False
        [turned] = self._llm.apply_model(negated_fingerprints)
        try:
            [self._plan] = self._llm.apply_model(lambda model: record_copies(model, tensors))
            for name, values in tensors.items():
                self._plan.carry_out_one(name, 0 - values)
            [negated] = self._llm.apply_model(fingerprints)
            self._plan.carry_out(tensors)
        except _LOAD_ERRORS as error:
            log.info("loading directly raised %r", error)
            return False
        [found] = self._llm.apply_model(fingerprints)
        return found == right and turned.items() <= negated.items()


def repack_heads(model: nn.Module) -> None:
    """On a CPU the head computes with a packed copy; reloading renews it only if it is not tied."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def fingerprints(model: nn.Module) -> dict[str, Fingerprint]:
    """Of every parameter and buffer."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: _fingerprint(tensor, negate=False) for name, tensor in named}


def negated_fingerprints(model: nn.Module) -> dict[str, Fingerprint]:
    """What `fingerprints` would be of the parameters with their signs turned."""
    return {name: _fingerprint(value, negate=True) for name, value in model.named_parameters()}


def _fingerprint(tensor: torch.Tensor, *, negate: bool) -> Fingerprint:
    plain = placed = 0
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        # Not -chunk: a zero keeps its sign so.
        values = (0 - chunk if negate else chunk).view(torch.uint8).long()
        places = torch.arange(len(values), device=values.device) % _PRIME + 1
        plain += int(values.sum())
        placed = placed * 3 + int((values * places).sum())
    return plain, placed
