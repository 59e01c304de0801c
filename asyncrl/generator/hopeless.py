"""A scorer that has never given a score will not: it ends the run at once, not after no_progress_s."""

from collections import Counter

from asyncrl.errors import ConfigError
from asyncrl.types import Verdict

_HOPELESS_VERDICTS = 64
"""After this many verdicts without a single score the scorer is taken to be broken."""


def check_scorer(counts: Counter[str], verdict: Verdict) -> None:
    """Look at the newest verdict beside the generator's running totals, which include it.

    Raises:
        ConfigError: there were enough, and never a score.
    """
    if verdict.status == "scored" or counts["verdict/scored"]:
        return
    failed = sum(counts[f"verdict/{kind}"] for kind in ("error", "timeout", "abstained"))
    if failed - counts["finish/abort"] >= _HOPELESS_VERDICTS:
        raise ConfigError(
            f"the first {failed} completions got no score at all; the last verdict was "
            f"{verdict.status!r}: {verdict.detail or 'no reason given'} (see task.*)"
        )
