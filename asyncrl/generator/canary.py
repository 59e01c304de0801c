"""Does the engine really sample under the weights it says it adopted?

The learner says what log-probs a fixed sequence has under its first weights (those in model.path) and
under each version it publishes; the engine scores the same sequence before any adoption and after one.
Let d_v be the root mean square over the sequence of engine minus learner at version v. Under equal
weights d_v is numerics alone, whatever v is, so

    d_0 <= MAX_START                        else the two compute different models
    d_v <= GROWTH * d_0 + floor             else version v did not arrive whole
    scores_v != scores_0  if the learner's log-probs moved (bit for bit: equal weights score equally)

The second line catches a transposed, skipped or stale tensor as far as it changes the log-probs by more
than numerics; the third catches the update that was reported and not made, however small. A fault that
is too small to see after one step grows with the versions, so it is looked for again at 2, 4, 8, ...
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightMismatchError

MAX_START = 0.1
"""Nats; bfloat16 engines differ from a float32 learner by 0.01 to 0.03."""

GROWTH = 4.0
FLOORS = {"float32": 2e-5, "bfloat16": 2e-2}
"""Nats by the engine's dtype, for a d_0 that is small by luck."""


class Canary:
    """Compares one engine with the learner; made before the first adoption."""

    def __init__(
        self,
        scores: NDArray[np.float32],
        logprobs: NDArray[np.float32],
        *,
        dtype: Literal["float32", "bfloat16"],
    ) -> None:
        """Take both sides' log-probs [T - 1] of the sequence under the weights in model.path.

        Raises:
            WeightMismatchError: they differ in length, or by more than numerics.
        """
        self._scores = scores
        self._logprobs = logprobs
        self._num_checks = 0
        self._first_version: int | None = None
        distance = _distance(scores, logprobs)
        if not distance <= MAX_START:
            raise WeightMismatchError(
                f"engine and learner loaded model.path, but the log-probs of a fixed sequence differ "
                f"by {distance:.3g} nats (root mean square, at most {MAX_START:g}): one of them "
                "computes another model; try engine.dtype='float32', or the other engine.kind"
            )
        self._limit = GROWTH * distance + FLOORS[dtype]

    def is_due(self, version: int) -> bool:
        """Whether to look after adopting `version`: the first, then 2, 4, 8, ... versions later."""
        if self._first_version is None:
            self._first_version = version
        passed = version - self._first_version
        return passed >= 2**self._num_checks if self._num_checks else True

    def check(
        self, version: int, scores: NDArray[np.float32], logprobs: NDArray[np.float32]
    ) -> float:
        """Compare after an adoption; returns the distance in nats.

        Raises:
            WeightMismatchError: the engine does not have the learner's weights.
        """
        self._num_checks += 1
        distance = _distance(scores, logprobs)
        moved = _distance(logprobs, self._logprobs)
        if moved > 0 and np.array_equal(scores, self._scores):
            raise WeightMismatchError(
                f"the engine reported version {version}, but its log-probs of a fixed sequence are "
                f"bit for bit those of its first weights, while the learner's moved by {moved:.3g} "
                "nats: nothing was adopted"
            )
        if not distance <= self._limit:
            raise WeightMismatchError(
                f"after adopting version {version}, the log-probs of a fixed sequence differ between "
                f"engine and learner by {distance:.3g} nats (root mean square; numerics explain "
                f"{self._limit:.3g}; the learner itself moved by {moved:.3g}): a tensor was skipped, "
                "misplaced or left stale"
            )
        return distance


def _distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Root mean square difference in nats.

    Raises:
        WeightMismatchError: different lengths.
    """
    if one.shape != other.shape:
        raise WeightMismatchError(
            f"the engine scored {one.shape[0]} tokens of the fixed sequence, the learner "
            f"{other.shape[0]}; both must use the same tokens"
        )
    return float(np.sqrt(np.mean((one.astype(np.float64) - other) ** 2)))
