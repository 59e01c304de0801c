"""Adopts staged weights, and looks whether the engine really has them.

| when                                             | what                                               |
|--------------------------------------------------|----------------------------------------------------|
| before the first adoption                        | score the probe's tokens: the weights of model.path |
| after an adoption that is due and has log-probs  | score them again and compare (canary.py)           |

Invariant: the first scores are those of the engine's own first weights, also when it joins or restarts in
the middle of a run. Whoever calls `adopt` sees to it that no evaluation is running.
"""

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightMismatchError
from asyncrl.generator.canary import Canary
from asyncrl.generator.engine import Engine
from asyncrl.telemetry.trace import Tracer
from asyncrl.weights.manifest import Probe
from asyncrl.weights.subscriber import StagedWeights


class Adopter:
    """Gives one engine new weights."""

    def __init__(self, engine: Engine, tracer: Tracer) -> None:
        """`engine` has the weights of model.path."""
        self.totals = {"adopted": 0.0, "canary/checks": 0.0, "canary/distance": 0.0}
        """Running totals for the generator's report; the distance in nats."""

        self._engine = engine
        self._tracer = tracer
        self._canary: Canary | None = None
        self._epoch = -1

    def adopt(self, staged: StagedWeights) -> None:
        """Adopt `staged`, which the caller releases.

        Raises:
            WeightMismatchError: it does not fit the engine's model, or the engine's log-probs are not
                the learner's.
        """
        probe = staged.probe
        if self._canary is None and probe is not None and not self.totals["adopted"]:
            scores = self._score(probe)
            first = np.array(probe.first_logprobs, np.float32)
            self._canary = Canary(scores, first, precision=self._engine.precision)
        with self._tracer.span("generator/adopt"):
            self._engine.adopt(staged.version, staged.tensors(), file=staged.file)
        self.totals["adopted"] += 1
        if self._canary is not None and probe is not None and probe.logprobs is not None:
            if staged.epoch != self._epoch:
                self._canary.restart()
                self._epoch = staged.epoch
            if self._canary.is_due(staged.version):
                logprobs = np.array(probe.logprobs, np.float32)
                distance = self._canary.check(staged.version, self._score(probe), logprobs)
                self.totals["canary/checks"] += 1
                self.totals["canary/distance"] += distance

    def _score(self, probe: Probe) -> NDArray[np.float32]:
        with self._tracer.span("generator/canary"):
            try:
                return self._engine.score(np.array(probe.tokens, np.int32))
            except ValueError as error:
                raise WeightMismatchError(
                    f"the engine cannot score the learner's fixed sequence: {error}; learner and "
                    "generators must load the same model.path (weights.canary=false turns this off)"
                ) from error
