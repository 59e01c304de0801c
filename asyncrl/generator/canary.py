"""Does the engine really sample under the weights it says it adopted?

The learner says what log-probs a fixed sequence has under its first weights (those in model.path) and
under versions it publishes; the engine scores the same sequence before any adoption and after one. Let
d_v be the mean over the sequence of |engine - learner| at version v, s_v the standard deviation of the
learner's log-probs over it. Under equal weights d_v is numerics alone, which grow with the logits as s_v
does, so, with floors f by the engine's precision,

    d_0 <= MAX_START * s_0                      else the two compute different models
    d_v <= GROWTH * d_0 * max(1, s_v / s_0) + f * s_v       else version v did not arrive whole
    scores_v != scores_0     if the learner's log-probs moved by more than d_0 + f * s_0

The second line catches a transposed, skipped or stale tensor as far as it changes the log-probs by more
than numerics; the third the update that was reported and not made, sooner than the second would (bit for
bit: equal weights score equally, while a step too small for the published type changes none of them). A
fault that is too small to see after one step grows with the versions, so it is looked for again after
2, 4, 8, ...

Two unrelated models differ by about 1.1 * s (two independent normals). Measured: SmolLM2-135M, 64 random
tokens: s = 3.3, d_0 = 0.09 between bfloat16 engine and bfloat16 learner, 0.07 to 0.10 at later versions;
one square matrix of 30 layers transposed: 0.47.
"""

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightMismatchError
from asyncrl.generator.engine import Precision

MAX_START = 0.25
GROWTH = 3.0
FLOORS: dict[Precision, float] = {"float32": 2e-5, "bfloat16": 1e-2, "fp8": 3e-2}
"""For a d_0 that is small by luck."""

_SWITCH = "weights.canary=false turns this check off"


class Canary:
    """Compares one engine with the learner; made before the first adoption."""

    def __init__(
        self,
        scores: NDArray[np.float32],
        logprobs: NDArray[np.float32],
        *,
        precision: Precision,
    ) -> None:
        """Take both sides' log-probs [T - 1] of the sequence under the weights in model.path.

        Raises:
            WeightMismatchError: they differ in length, or by more than numerics.
        """
        self._scores = scores
        self._logprobs = logprobs
        self._floor = FLOORS[precision]
        self._spread = float(np.std(logprobs, dtype=np.float64))
        self._start = mean_distance(scores, logprobs)
        self.restart()
        limit = MAX_START * self._spread
        if not self._start <= limit:
            raise WeightMismatchError(
                f"engine and learner loaded model.path, but the log-probs of a fixed sequence differ "
                f"by {self._start:.3g} nats (mean; at most {limit:.3g}): one of them computes another "
                "model, or the files changed meanwhile; try engine.dtype='float32', or the other "
                f"engine.kind ({_SWITCH})"
            )

    def restart(self) -> None:
        """Look as often as at the start again: another learner publishes now."""
        self._num_checks = 0
        self._first_version: int | None = None

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
        distance = mean_distance(scores, logprobs)
        moved = mean_distance(logprobs, self._logprobs)
        spread = max(self._spread, float(np.std(logprobs, dtype=np.float64)))
        floor = self._floor * spread
        if moved > self._start + floor and np.array_equal(scores, self._scores):
            raise WeightMismatchError(
                f"the engine reported version {version}, but its log-probs of a fixed sequence are "
                f"bit for bit those of its first weights, while the learner's moved by {moved:.3g} "
                f"nats: nothing was adopted ({_SWITCH})"
            )
        limit = GROWTH * self._start * (spread / self._spread if self._spread else 1.0) + floor
        if not distance <= limit:
            raise WeightMismatchError(
                f"after adopting version {version}, the log-probs of a fixed sequence differ between "
                f"engine and learner by {distance:.3g} nats (mean; numerics explain {limit:.3g}; the "
                f"learner itself moved by {moved:.3g}): a tensor was skipped, misplaced or left stale "
                f"({_SWITCH})"
            )
        return distance


def mean_distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Mean absolute difference in nats; single tokens far out count little.

    Raises:
        WeightMismatchError: different lengths.
    """
    if one.shape != other.shape:
        raise WeightMismatchError(
            f"the engine scored {one.shape[0]} tokens of the fixed sequence, the learner "
            f"{other.shape[0]}; both must use the same tokens"
        )
    return float(np.mean(np.abs(one.astype(np.float64) - other)))
