"""Who may join: a Hello is judged here, before anything about its sender is believed.

Order of the checks: protocol, token, run, config, name, learner. A stranger without the token
learns the protocol number and nothing else of this run; the token itself is never in an answer.
"""

import hmac

from asyncrl.broker.peers import Peer, Peers
from asyncrl.broker.settings import Settings
from asyncrl.wire.messages import PROTOCOL, Hello


def stranger(hello: Hello, settings: Settings) -> str | None:
    """Why the sender does not belong to this run, naming both values; None if it does."""
    if hello.protocol != PROTOCOL:
        return (
            f"you speak protocol {hello.protocol}, the broker speaks {PROTOCOL}; update one of us"
        )
    if not hmac.compare_digest(hello.token.encode(), settings.token.encode()):
        return "your token is not the broker's (values not shown); see broker.token_path"
    if hello.run_id != settings.run_id:
        return f"you belong to run {hello.run_id!r}, the broker to run {settings.run_id!r}"
    if hello.config_digest != settings.config_digest:
        return (
            f"your config has digest {hello.config_digest}, the broker's {settings.config_digest}; "
            "start every process with the same file and overrides"
        )
    return None


def conflict(hello: Hello, peers: Peers, *, last_epoch: int | None, now_s: float) -> str | None:
    """Why the peer cannot join beside those who are here; None if it can."""
    same = peers.named(hello.name)
    if same is not None and not _replaces(hello, same):
        return (
            f"a {same.role} named {hello.name!r} lives, heard {now_s - same.heard_s:.1f} s ago; "
            "take another name or wait until it is lost"
        )
    if hello.role != "learner":
        return None
    learner = peers.learner
    if learner is not None:
        return (
            f"learner {learner.name!r} lives, heard {now_s - learner.heard_s:.1f} s ago; "
            f"{hello.name!r} would be a second one"
        )
    if last_epoch is not None and hello.epoch <= last_epoch:
        return (
            f"a learner that returns needs a higher epoch: got {hello.epoch}, the last was "
            f"{last_epoch}"
        )
    return None


def _replaces(hello: Hello, peer: Peer) -> bool:
    """A generator started again: its supervisor saw the old one die before its beats were missed."""
    return hello.role == peer.role == "generator" and hello.incarnation > peer.incarnation
