"""The broker's process: a socket loop around `Broker`, which decides everything.

The loop blocks in one place, for at most `_POLL_S`; ends a few seconds after the run is over, or as
soon as every peer has said Bye; and says once a minute what the run is waiting for.
"""

import json
import logging
import os
import time
from pathlib import Path

from asyncrl.broker.drops import DropLog
from asyncrl.broker.peers import Outgoing
from asyncrl.broker.settings import Settings
from asyncrl.broker.state import Broker
from asyncrl.config import RunConfig
from asyncrl.errors import PeerLostError
from asyncrl.telemetry.trace import Tracer, process_start_s
from asyncrl.wire.channel import MAX_MESSAGE_BYTES, Listener, Malformed

log = logging.getLogger(__name__)

_POLL_S = 0.2
"""Longest wait for a message; the resolution of every deadline here."""

_FAREWELL_S = 5.0
"""How long peers have to say Bye once the run is over."""

_REPORT_S = 60.0

_TRACE_GRAIN_S = 0.5
"""Waits between messages, hundreds a second, go to the trace file summed up over this long."""


def run(
    config: RunConfig,
    *,
    run_id: str,
    token: str,
    address_file: Path | None,
    trace: Path | None = None,
    drops: Path | None = None,
) -> None:
    """Serve one run until it is over.

    Args:
        config: the whole tree; its digest is what peers must present.
        run_id: names the run; peers of another one are refused.
        token: the shared key; "" if none is needed (loopback).
        address_file: where to write {"endpoint", "run_id", "pid"} as JSON, mode 0600, once peers
            can connect; None writes nothing.
        trace: file for trace events; None writes none.
        drops: file for groups that left untrained; None writes none.

    Raises:
        ConfigError: broker.address cannot be bound.
        NoProgressError, PeerLostError, ProtocolError: the run failed; all peers were told why.
    """
    settings = Settings.from_config(config, run_id=run_id, token=token)
    listener = Listener(config.broker.address, max_message_bytes=MAX_MESSAGE_BYTES)
    since_s = process_start_s()
    tracer = Tracer(trace, process="broker", kind="broker", since_s=since_s, grain_s=_TRACE_GRAIN_S)
    tracer.joined()
    # Payloads are texts as rollouts are.
    num_payloads = config.telemetry.num_detailed_groups if config.telemetry.rollouts else 0
    journal = DropLog(drops, num_payloads=num_payloads) if drops is not None else None
    try:
        log.info("run %s: the broker listens on %s", run_id, listener.endpoint)
        if address_file is not None:
            write_address(address_file, endpoint=listener.endpoint, run_id=run_id)
        broker = Broker(settings, journal=journal, now_s=time.monotonic())
        try:
            serve(broker, listener, tracer)
        except KeyboardInterrupt:
            now_s = time.monotonic()
            interrupted = PeerLostError("the broker was interrupted")
            send_all(broker, listener, broker.stop(interrupted, now_s), now_s)
            raise
    finally:
        listener.close()
        tracer.close()
        if journal is not None:
            journal.close()
    if broker.failure is not None:
        raise broker.failure


def write_address(path: Path, *, endpoint: str, run_id: str) -> None:
    """Write the address file as a whole: a reader sees all of it or none; only the owner may."""
    text = json.dumps({"endpoint": endpoint, "run_id": run_id, "pid": os.getpid()})
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)


def serve(broker: Broker, listener: Listener, tracer: Tracer) -> None:
    """Receive, handle, send; returns when the run is over and peers had time to say Bye."""
    report_s = time.monotonic() + _REPORT_S
    over_s: float | None = None
    while True:
        with tracer.span("broker/idle"):
            incoming = listener.receive(_POLL_S)
        broker.peers.broker_counters = tracer.totals()
        now_s = time.monotonic()
        if isinstance(incoming, Malformed):
            log.warning("malformed message: %s", incoming.reason)
            out = broker.malformed(incoming.sender, incoming.reason, now_s)
        elif incoming is not None:
            out = broker.handle(incoming.sender, incoming.message, incoming.frames, now_s)
        else:
            out = []
        send_all(broker, listener, out + broker.tick(now_s), now_s)
        if now_s >= report_s:
            report_s = now_s + _REPORT_S
            log.info("%s", json.dumps(broker.status(now_s)))
        if broker.over is not None:
            if over_s is None:
                over_s = now_s
                log.info("the run is over: %s", broker.over.reason)
            if len(broker.peers) == 0 or now_s - over_s >= _FAREWELL_S:
                return


def send_all(broker: Broker, listener: Listener, out: list[Outgoing], now_s: float) -> None:
    """Send; whoever cannot be reached is lost at once, which may cause further messages."""
    while out:
        unreachable = [
            o.receiver for o in out if not listener.send(o.receiver, o.message, o.frames)
        ]
        out = []
        for receiver in dict.fromkeys(unreachable):
            out += broker.unreachable(receiver, now_s)
