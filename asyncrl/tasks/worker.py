"""One scoring process, driven by scoring.py through pipes.

Started as `python -m asyncrl.tasks.worker SETTINGS`; SETTINGS is JSON: task (the config section),
seed, max_memory_bytes, parent_pid.

It builds its scorer once and then scores one completion after the other, in the order they came.
What it runs may be broken: the memory limit is set before a user's file or an extra is imported,
prints go to stderr, the process dies with its parent, and one that hangs is killed from outside.

Frames are a big-endian u32 length and a MessagePack array.

| direction | array                                                                              |
|-----------|------------------------------------------------------------------------------------|
| in        | key, completion, answer, messages, raw_text, reference                             |
| out       | "ready", once the scorer is built                                                  |
| out       | "verdict", key, status, score, detail, seconds of CLOCK_MONOTONIC when it was done |

A scorer that cannot be built ends the process with a sentence on stderr, running out of memory with
EXIT_OUT_OF_MEMORY, end of input with 0.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgpack
from pydantic import TypeAdapter

import asyncrl
from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError, in_a_line
from asyncrl.tasks import make_scorer
from asyncrl.tasks.base import Problem
from asyncrl.tasks.scorers import Scorer

EXIT_OUT_OF_MEMORY = 66
MAX_DETAIL_CHARS = 200

_PR_SET_PDEATHSIG = 1


def pack_frame(*fields: object) -> bytes:
    """Fields as one frame."""
    body: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
    return len(body).to_bytes(4, "big") + body


def unpack_body(body: bytes) -> list[Any]:
    """The fields of one frame, its length taken off; ValueError if it is not a frame."""
    fields = msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=True)
    if not isinstance(fields, list):
        raise ValueError(f"a frame holds an array, got {type(fields).__name__}")
    return fields


def main() -> None:
    """Run the process; never returns."""
    settings = json.loads(sys.argv[1])
    read_fd, write_fd = _take_pipes()
    _bind_to_parent(settings["parent_pid"])
    _limit_resources(settings["max_memory_bytes"])
    config: TaskConfig = TypeAdapter[TaskConfig](TaskConfig).validate_python(settings["task"])
    score = _build(config, settings["seed"])
    _write(write_fd, pack_frame("ready"))
    while (body := _read_body(read_fd)) is not None:
        key, completion, problem = _parse_item(body)
        status, value, detail = _judge(score, problem, completion)
        _write(write_fd, pack_frame("verdict", key, status, value, detail, time.monotonic()))
    os._exit(0)


def _build(config: TaskConfig, seed: int) -> Scorer:
    """The scorer; what keeps it from being built is the last thing that this process says."""
    try:
        return make_scorer(config, seed=seed)
    except ConfigError as error:
        sys.exit(str(error))
    except Exception as error:  # noqa: BLE001 - a user's file may raise anything while it is imported
        file, line = _place(error)
        sys.exit(f"{in_a_line(error)} ({file}:{line})" if file else in_a_line(error))


def _place(error: Exception) -> tuple[str, int]:
    """Which line of the user's file, or of a data set's package, led to the error; "" if none did.

    Of that file the innermost frame: not the library's that it called, where the cause is seldom.
    """
    ours = (str(Path(asyncrl.__file__).parent) + os.sep, "<frozen ")
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(ours)
    ]
    return next(((file, line) for file, line in reversed(frames) if file == frames[0][0]), ("", 0))


def _describe(error: Exception) -> str:
    """The error and its place; a long text is cut, so that the place is not."""
    file, line = _place(error)
    place = f" ({Path(file).name}:{line})" if file else ""
    return f"{type(error).__name__}: {error}"[: max(0, MAX_DETAIL_CHARS - len(place))] + place


def _take_pipes() -> tuple[int, int]:
    """Keep the pipes for ourselves; what user code prints or reads goes to stderr and /dev/null."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return read_fd, write_fd


def _bind_to_parent(parent_pid: int) -> None:
    """Die when the parent does, also if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def _limit_resources(max_memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _parse_item(body: bytes) -> tuple[int, str, Problem]:
    key, completion, answer, messages, raw_text, reference = unpack_body(body)
    problem = Problem(
        answer=answer, messages=tuple(messages), raw_text=raw_text, reference=reference
    )
    return key, completion, problem


def _judge(score: Scorer, problem: Problem, completion: str) -> tuple[str, float | None, str]:
    """Status, score and detail of a verdict: whatever is not a finite number is no score."""
    try:
        result = score(problem, completion)
        if result is None:
            return "abstained", None, ""
        if not hasattr(result, "__float__"):
            return "error", None, f"the score is not a number, got {type(result).__name__}"
        value = float(result)
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)  # the heap may be in pieces: start afresh
    except Exception as error:  # noqa: BLE001 - scorers may raise anything; it becomes the verdict
        return "error", None, _describe(error)
    if not math.isfinite(value):
        return "error", None, f"the score is not finite, got {value}"
    return "scored", value, ""


def _read_body(fd: int) -> bytes | None:
    """The next frame without its length; None at the end of input."""
    header = _read_exactly(fd, 4)
    return None if header is None else _read_exactly(fd, int.from_bytes(header, "big"))


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    main()
