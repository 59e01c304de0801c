"""New weights straight into the parameters of a running vLLM model, where that is proved right.

| way       | what                                              | price                                  |
|-----------|---------------------------------------------------|----------------------------------------|
| layerwise | vLLM's reload_weights: right for every model,     | each layer is rebuilt from the meta    |
|           | quantization and layout                           | device: 130 ms for 30 layers (H200,    |
|           |                                                   | 0.26), nearly all on the host          |
| direct    | the copies that the model's own load_weights made | the copies, started by one call        |
|           | once are made again (copy_plan.py)                |                                        |

Invariant: what `load` leaves is what the layerwise way would leave. Direct is used only after a trial on
the first load. The tensors are loaded layerwise; a plan is recorded; then it is carried out on their
negatives and on them as they are. The former must have turned the sign of every element of every
parameter, the latter must give back every bit of the first. A loader that skips, repacks, moves,
computes or fails does not pass. Of a model that is cut over several workers each tries its own part.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from asyncrl.errors import WeightMismatchError
from asyncrl.generator.copy_plan import CopyPlan, record_copies

log = logging.getLogger(__name__)

Fingerprint = tuple[int, int]
"""Two sums over a tensor's bytes: plain, and each byte weighed by its place, so that moves show."""

_CHUNK = 2**22
_PRIME = 65521

_LOAD_ERRORS = (
    AttributeError, AssertionError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What a load_weights that is not made for a loaded model was seen to raise, and its like."""


class DirectLoader:
    """Loads whole checkpoints into one worker's model; only while nothing is computed with it."""

    def __init__(
        self,
        model: nn.Module,
        reload: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
        *,
        may_be_direct: bool,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            model: of vLLM; has load_weights.
            reload: the layerwise way.
            may_be_direct: False for models that are known to be stored otherwise than they are loaded.
        """
        self.direct: bool | None = None if may_be_direct else False
        """Whether loads are direct; None before the first."""

        self.plan: CopyPlan | None = None
        """The copies of a direct load, once that was proved right."""

        self._model = model
        self._reload = reload

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load tensors under their names on disk; nothing of them is kept.

        Raises:
            WeightMismatchError: the trial did damage that a reload does not repair; the model is lost.
        """
        if self.plan is not None:
            self.plan.carry_out(tensors)
            return
        self._reload(iter(tensors.items()))
        if self.direct is None:
            self._choose(tensors)

    def _choose(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """After a layerwise load of `tensors`: set `direct`, and leave them loaded."""
        right = fingerprints(self._model)
        plan = self._try(tensors, right)
        self.direct = plan is not None
        log.info("weights are adopted %s", "directly" if self.direct else "layer by layer")
        self.plan = plan
        if plan is None:
            self._reload(iter(tensors.items()))
            found = fingerprints(self._model)
            if found != right:
                raise WeightMismatchError(
                    "vLLM's load_weights of this architecture changed more than it loads "
                    f"({next(name for name in right if found[name] != right[name])!r}), and its "
                    "reload did not bring it back; use engine.kind='hf' for this model.path"
                )

    def _try(
        self, tensors: Mapping[str, torch.Tensor], right: dict[str, Fingerprint]
    ) -> CopyPlan | None:
        """The plan, if it does what it must."""
        if not all(values.is_floating_point() for values in tensors.values()):
            return None
        turned = negated_fingerprints(self._model)
        try:
            load: Any = self._model.load_weights
            plan = record_copies(tensors, lambda: load(tensors.items()))
            for name, values in tensors.items():
                plan.carry_out_one(name, 0 - values)
            negated = fingerprints(self._model)
            plan.carry_out(tensors)
        except _LOAD_ERRORS as error:
            log.info("loading directly raised %r", error)
            return None
        is_right = fingerprints(self._model) == right and turned.items() <= negated.items()
        return plan if is_right else None


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
