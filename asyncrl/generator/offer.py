"""Do offered tensors fit a model? Asked before the first value is written.

Invariant: an offer that passes `check_offer` has every tensor of the model exactly once, of its shape
and kind, in the learner's names; tied parameters may come once or several times, then equal.
"""

from collections.abc import Iterable

import torch
from torch import nn

from asyncrl.errors import WeightMismatchError


def collect(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The offer by name.

    Raises:
        WeightMismatchError: a name comes twice.
    """
    offered: dict[str, torch.Tensor] = {}
    for name, values in tensors:
        if name in offered:
            raise WeightMismatchError(f"tensor {name!r} was offered twice")
        offered[name] = values
    return offered


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own parameters and persistent buffers by name; tied ones are one object."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return state


def check_offer(own: dict[str, torch.Tensor], offered: dict[str, torch.Tensor]) -> None:
    """Refuse an offer that does not fit a model's `state_of` (which may be on the meta device).

    Raises:
        WeightMismatchError: naming the first tensor that is unknown, missing, of another shape or
            kind, or differs from one it is tied to.
    """
    first_offer: dict[int, str] = {}
    for name, values in offered.items():
        mine = own.get(name)
        if mine is None:
            raise WeightMismatchError(
                f"tensor {name!r} is not in the engine's model ({len(own)} tensors, the first is "
                f"{next(iter(own))!r}); learner and generators must load the same model.path"
            )
        if mine.shape != values.shape or mine.is_floating_point() != values.is_floating_point():
            raise WeightMismatchError(
                f"tensor {name!r}: expected {list(mine.shape)} {mine.dtype}, "
                f"got {list(values.shape)} {values.dtype}"
            )
        other = first_offer.setdefault(id(mine), name)
        if other != name and not torch.equal(offered[other], values):
            raise WeightMismatchError(
                f"tensors {other!r} and {name!r} are tied in the engine's model, but differ"
            )
    for name, mine in own.items():
        if name not in offered and id(mine) not in first_offer:
            raise WeightMismatchError(
                f"tensor {name!r} of the engine's model is missing among the {len(offered)} offered"
            )
