"""A scorer that has never given a score will not: it ends the run at once, not after no_progress_s."""

from collections import Counter

from asyncrl.config.sections import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.types import Verdict

_HOPELESS_VERDICTS = 64
"""After this many verdicts without a single score the scorer is taken to be broken."""

_HOPELESS_S = 60.0
"""After this long with nothing but timeouts too, and at least after `_HOPELESS_TIMEOUTS` a worker."""

_HOPELESS_TIMEOUTS = 4


def check_scorer(counts: Counter[str], verdict: Verdict, scoring: ScoringConfig) -> None:
    """Look at the newest verdict beside the generator's running totals, which include it.

    Raises:
        ConfigError: there were enough, or timeouts alone for long enough, and never a score.
    """
    if verdict.status == "scored" or counts["verdict/scored"]:
        return
    failed = sum(counts[f"verdict/{kind}"] for kind in ("error", "timeout", "abstained"))
    failed -= counts["finish/abort"]
    # The workers wait side by side: as many timeouts come within one deadline.
    rounds = counts["verdict/timeout"] / scoring.num_workers
    has_hung = rounds >= max(_HOPELESS_TIMEOUTS, _HOPELESS_S / scoring.deadline_s)
    only_hung = failed == counts["verdict/timeout"]
    if failed >= _HOPELESS_VERDICTS or (has_hung and only_hung):
        raise ConfigError(
            f"the first {failed} completions got no score at all; the last verdict was "
            f"{verdict.status!r}: {verdict.detail or 'no reason given'} (see task.*)"
        )
