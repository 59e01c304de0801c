"""LoRA in vLLM: versions as adapters that live side by side, or merged into the engine's weights.

Pinned: every adoption registers one more adapter, in memory, under an id and a name that are never used
again. A completion is bound to the newest one when vLLM gets it and keeps it to its last token, so it
has exactly one version; no request is paused, no cache is reset, and cached blocks are keyed by adoption.

| when    | what                                                                                  |
|---------|---------------------------------------------------------------------------------------|
| adopt   | adapters that no running completion is bound to are dropped; the new one is           |
|         | registered, and copied to a slot of the device by the first step that needs it        |
| start   | bound to the newest; before any adoption to an adapter of zeros, which is version 0:  |
|         | vLLM's CPU kernels give a request without adapter whatever stands in the last slot    |

Invariant: an adapter that a running completion is bound to stays registered. vLLM evicts the least
recently used one when more than max_cpu_loras are registered, and then dies of a missing file; but at
most one per running completion and the newest are, and `engine_arguments` makes room for all of them.

vLLM decodes at most max_loras = k + 1 adapters in one batch. Completions that may still be trained have
at most that many versions, the newest included. If others linger (a group given up elsewhere), those of
the newest version wait inside vLLM until an old version has ended; nothing fails.

Never used: `load_inplace` (it reads cached blocks of the old weights, and reloads at every step), and
vLLM's own `add_lora` (it takes a path, and moves adapters between slots under a running batch).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLMEngine
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.hf_model import choose_device, choose_dtype
from asyncrl.generator.memory import slot_rank
from asyncrl.generator.merge import AdapterOffer, MergeBase
from asyncrl.generator.model_facts import ModelFacts
from asyncrl.generator.offer import check_offer, collect
from asyncrl.generator.vllm_lora_worker import EXTENSION
from asyncrl.generator.vllm_worker import as_arguments, shared_file
from asyncrl.weights.snapshot import named_weights


def lora_arguments(
    lora: LoraConfig, modules: Iterable[str], *, max_staleness: int, max_completions: int
) -> dict[str, Any]:
    """EngineArgs for versions served as adapters of `modules`; nothing else is wrapped."""
    max_loras = max_staleness + 1
    return {
        "enable_lora": True,
        "max_lora_rank": slot_rank(lora.rank),
        "max_loras": max_loras,
        # One for every completion that may run, the newest, and one that is about to be dropped.
        "max_cpu_loras": max(max_loras, max_completions) + 2,
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "worker_extension_cls": EXTENSION,
    }


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """What completions are bound to."""

    version: int
    request: LoRARequest


class PinnedVersions:
    """The adapters of one engine."""

    def __init__(self, llm: LLMEngine, offer: AdapterOffer, lora: LoraConfig, version: int) -> None:
        """The model as loaded is `version`, as an adapter that changes nothing."""
        self._llm = llm
        self._offer = offer
        self._rank = lora.rank
        self._is_parallel = llm.vllm_config.parallel_config.world_size > 1
        self._num_made = 0
        self._registered: set[int] = set()
        self.newest = self._register(version, offer.zeros())

    def adopt(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        in_use: Collection[PinnedVersion],
    ) -> None:
        """Make `tensors` the newest version; what is neither in use nor the newest is dropped.

        Raises:
            WeightMismatchError: they do not fit; the newest version is what it was.
        """
        offered = self._offer.check(tensors)
        self._drop_unused(in_use)
        self.newest = self._register(version, offered)

    def _register(self, version: int, offered: Mapping[str, torch.Tensor]) -> PinnedVersion:
        number = self._num_made + 1
        factors = (self._rank, self._offer.scale)
        if self._is_parallel:
            with shared_file(offered) as file:
                arguments = (number, *as_arguments(file), *factors)
                self._llm.collective_rpc("put_adapter_from_file", args=arguments)
        else:
            self._llm.collective_rpc("put_adapter", args=(number, offered, *factors))
        self._num_made = number
        self._registered.add(number)
        # Names are compared, and hashed into cached blocks; the path is never read.
        request = LoRARequest(
            lora_name=f"adoption-{number}", lora_int_id=number, lora_path="in-memory"
        )
        return PinnedVersion(version, request)

    def _drop_unused(self, in_use: Collection[PinnedVersion]) -> None:
        kept = {pinned.request.lora_int_id for pinned in (*in_use, self.newest)}
        for number in sorted(self._registered - kept):
            self._llm.engine_core.remove_lora(number)
            self._registered.discard(number)


class BaseWeights:
    """A copy of the model of model.path beside the engine's own, for adapters merged into the latter."""

    def __init__(
        self, path: str, dtype: torch.dtype, offer: AdapterOffer, device: torch.device
    ) -> None:
        """Load it once more, in the engine's type, to where the engine takes tensors from at no cost.

        Raises:
            ConfigError: it cannot be loaded, or vLLM has left no room for it.
        """
        self._offer = offer
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            weights = {name: value.detach() for name, value in named_weights(model)}
            self._names = list(weights)
            self._base = MergeBase(weights, offer, device)
            adapted = {f"{module}.weight" for module in offer.modules}
            self._others = {n: v.to(device) for n, v in weights.items() if n not in adapted}
            del model, weights  # on a CPU they are one copy too many
            self.merged(offer.zeros().items())  # a version needs room too: better found out now
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"lora.serving='merged' keeps two more copies of the model on {device}, and there is "
                f"no room: lower engine.gpu_memory_utilization, or use lora.serving='pinned' ({error})"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={path!r} cannot be loaded: {error}") from error

    @torch.no_grad()
    def merged(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A whole version by name.

        Raises:
            WeightMismatchError: the adapter does not fit.
        """
        whole = self._others | dict(self._base.merged(self._offer.check(tensors)))
        return {name: whole[name] for name in self._names}


class LoraServing:
    """How an engine serves what it adopts: whole models, adapters merged into one, or pinned ones."""

    def __init__(
        self,
        path: str,
        config: VllmEngineConfig,
        model: ModelFacts,
        lora: LoraConfig,
        *,
        max_staleness: int,
    ) -> None:
        """For the model in `path`, which nothing is loaded of before `start`.

        Raises:
            ConfigError: lora.target_modules does not fit it, or vLLM has no kernels for its type.
        """
        self.arguments: dict[str, Any] = {}
        """EngineArgs beside those of every engine."""

        self.pinned: PinnedVersions | None = None
        """The book of versions, if they are adapters side by side."""

        self._path = path
        self._dtype = choose_dtype(config.dtype, choose_device("auto"))
        self._lora = lora
        self._model = model
        self._base: BaseWeights | None = None
        self._offer = AdapterOffer(model.state, model.linear, lora) if lora.rank else None
        if self._offer is not None and lora.serving == "pinned":
            if self._dtype == torch.float32 and current_platform.is_cuda():
                raise ConfigError(
                    'engine.dtype="float32" with lora.serving="pinned": vLLM\'s adapters take 16 bits '
                    'on a GPU; use engine.dtype="bfloat16" or lora.serving="merged"'
                )
            self.arguments = lora_arguments(
                lora,
                self._offer.modules,
                max_staleness=max_staleness,
                max_completions=config.max_concurrent_completions,
            )

    def start(self, llm: LLMEngine, device: torch.device, version: int) -> None:
        """Once the engine holds the model as `version`; its tensors are best offered on `device`.

        Raises:
            ConfigError: the model cannot be loaded once more, for merging.
        """
        if self._offer is None:
            return
        if self._lora.serving == "pinned":
            self.pinned = PinnedVersions(llm, self._offer, self._lora, version)
        else:
            self._base = BaseWeights(self._path, self._dtype, self._offer, device)

    @property
    def adapts(self) -> bool:
        """Whether what is offered is an adapter."""
        return self._offer is not None

    @property
    def merges(self) -> bool:
        """Whether what is loaded is computed from what is offered."""
        return self._base is not None

    def checked(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        """A whole version by name, out of what the learner publishes; not for pinned ones.

        Raises:
            WeightMismatchError: a tensor is missing, unknown, there twice, or of another shape or kind.
        """
        if self._base is not None:
            return self._base.merged(tensors)
        offered = collect(tensors)
        check_offer(self._model.state, offered)
        return offered
