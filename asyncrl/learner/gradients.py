"""Whether consecutive gradients point the same way, at a bounded cost.

    cosine = g . g' / (|g| |g'|)        over a fixed sample of the gradient's elements

Every p-th element of each rank's own gradients is kept, p a prime chosen so that about `MAX_ELEMENTS`
remain: memory and time do not grow with the model, and a prime never walks along one column of a
matrix. For independent directions the cosine is about 0; asynchronous training was seen to keep it
high (arXiv:2603.01501). Scaling does not change it, so clipping does not matter.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.learner.ranks import Ranks

MAX_ELEMENTS = 2**20


class _Products(NamedTuple):
    both: float
    now: float
    before: float


class GradientSketch:
    """Remembers a sample of the last gradient. Lost at a restart: the first cosine then is missing."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """For the parameters whose gradients will be compared, after they were sharded."""
        self._parameters = list(parameters)
        num_elements = sum(_local(parameter).numel() for parameter in self._parameters)
        self._stride = _next_prime(max(1, num_elements // MAX_ELEMENTS))
        self._last: Tensor | None = None

    def cosine(self, ranks: Ranks) -> float | None:
        """Cosine of the present gradient with the one of the last call; None at first, or if either
        is 0. Every rank must call it.
        """
        now, before = self._sample(), self._last
        self._last = now
        if before is None:
            return None
        products = ranks.all_reduce_sums(
            {"both": now @ before, "now": now @ now, "before": before @ before}
        )
        sums = _Products(**products)
        length = (sums.now * sums.before) ** 0.5
        return sums.both / length if length > 0 else None

    def _sample(self) -> Tensor:
        """This rank's part of the sample, float32."""
        parts = []
        offset = 0
        for parameter in self._parameters:
            size = _local(parameter).numel()
            gradient = parameter.grad
            if gradient is None:
                count = len(range(offset, size, self._stride))
                parts.append(torch.zeros(count, device=_local(parameter).device))
            else:
                parts.append(_local(gradient).flatten()[offset :: self._stride].float())
            # The walk goes on across parameters, so that small ones are sampled in turn.
            offset = (offset - size) % self._stride
        return torch.cat(parts)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _next_prime(start: int) -> int:
    """The smallest prime >= start; 1 for 1, which keeps everything."""
    number = start
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
