"""What the run is waiting for, in words for a log line or an error, and in numbers."""

from asyncrl.broker.epoch import Epoch
from asyncrl.broker.peers import Peers

TROUBLES = {
    "verdict/error": "scorings failed",
    "verdict/timeout": "scorings timed out",
    "verdict/abstained": "completions had no score",
    "prompts/too_long": "prompts were too long",
}
"""Counters of generators that explain why no group comes back finished."""


def waits_for(epoch: Epoch | None, peers: Peers, now_s: float) -> str:
    """Who has to act before the next step can be trained, and since when."""
    if epoch is None:
        return "no learner has joined"
    if peers.learner is None:
        return f"the learner of epoch {epoch.number} has left and none has returned"
    version = epoch.groups.ledger.version
    if epoch.want_step is None:
        return f"the learner is at work on version {version}"
    waited_s = now_s - epoch.want_step_since_s
    text = f"step {epoch.want_step}, asked for {waited_s:.0f} s ago, lacks "
    return text + epoch.groups.missing_text(now_s) + "; " + _generators(peers) + _troubles(peers)


def _generators(peers: Peers) -> str:
    generators = peers.generators
    if not generators:
        seen = peers.num_generators_ever
        return f"all {seen} generators that joined are gone" if seen else "no generator has joined"
    parts = []
    for peer in generators:
        held = "has reported no version" if peer.holds is None else f"holds version {peer.holds[1]}"
        doing = ", is evaluating" if peer.is_evaluating else ""
        doing += ", asks for work" if peer.request else ""
        parts.append(f"{peer.name} {held}{doing}")
    return "; ".join(parts)


def _troubles(peers: Peers) -> str:
    """What went wrong so far without ending anything; "" if nothing."""
    totals = peers.counters()
    parts = [f"{totals[name]:.0f} {what}" for name, what in TROUBLES.items() if totals.get(name)]
    return f"; so far {', '.join(parts)} (see the generators' logs)" if parts else ""


def status(epoch: Epoch | None, peers: Peers, now_s: float) -> dict[str, object]:
    """The state for a log: what is waited for, the books, the queue."""
    values: dict[str, object] = {
        "waits_for": waits_for(epoch, peers, now_s),
        "num_generators": len(peers.generators),
    }
    if epoch is not None:
        values |= {
            "epoch": epoch.number,
            "version": epoch.groups.ledger.version,
            "queued_bytes": epoch.groups.queued_bytes,
            **epoch.groups.counts().model_dump(),
        }
    return values
