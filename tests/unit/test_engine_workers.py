"""Errors of an engine that has worker processes: only the end of one of those becomes PeerLostError."""

import multiprocessing
import os
import signal
import sys
import time
from contextlib import contextmanager

import pytest

from asyncrl.errors import PeerLostError
from asyncrl.generator import engine_workers
from asyncrl.generator.engine_workers import EngineWorkers

SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def sleeping(name, *, exits=None):
    target, argument = (time.sleep, 600) if exits is None else (sys.exit, exits)
    process = SPAWN.Process(target=target, args=(argument,), name=name, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_a_killed_worker_is_named_before_those_that_were_told_to_stop():
    with sleeping("scorer") as other:
        workers = EngineWorkers()
        with sleeping("W-0") as told, sleeping("W-1") as killed:
            workers.started()
            os.kill(killed.pid, signal.SIGKILL)
            killed.join()
            told.terminate()
            told.join()
            other.kill()
            with (
                pytest.raises(PeerLostError) as raised,
                workers.guard(),
            ):
                raise AssertionError
    assert f"W-1 (pid {killed.pid}, killed by SIGKILL), W-0" in str(raised.value)
    assert "scorer" not in str(raised.value)
    assert isinstance(raised.value.__cause__, AssertionError)


def test_a_worker_that_ended_by_itself_is_named_with_its_exit_code():
    workers = EngineWorkers()
    with sleeping("W-0", exits=3) as process:
        workers.started()
        with pytest.raises(PeerLostError, match=r"W-0 \(pid \d+, exit code 3\)"), workers.guard():
            raise RuntimeError("cancelled")  # it is still ending: that is waited for
    assert process.exitcode == 3
    assert workers.are_lost


def test_an_error_while_all_workers_live_stays_itself(monkeypatch):
    monkeypatch.setattr(engine_workers, "_NOTICE_S", 0.1)
    workers = EngineWorkers()
    with sleeping("W-0"):
        workers.started()
        with pytest.raises(RuntimeError, match="no memory"), workers.guard():
            raise RuntimeError("no memory")
    assert not workers.are_lost


def test_without_workers_nothing_is_waited_for(monkeypatch):
    monkeypatch.setattr(engine_workers, "_NOTICE_S", 1e6)
    workers = EngineWorkers()
    workers.started()
    with pytest.raises(OSError, match="disk"), workers.guard():
        raise OSError("disk")
