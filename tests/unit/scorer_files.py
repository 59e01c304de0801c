"""A scorer file that misbehaves on demand, and pools and processes to watch it with."""

import os
import time
from pathlib import Path

from asyncrl.config import (
    JsonlTask,
)
from asyncrl.tasks.base import Problem
from asyncrl.tasks.scoring import ScoringPool
from asyncrl.types import Verdict

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem(raw_text="q", answer="a")
PATIENCE_S = 60.0
"""How long a test waits for what should come at once; only a failing test takes it."""

SCORER = """
import ctypes, json, math, os, signal, subprocess, sys, time

def score(completion):
    kind, _, rest = completion.partition(" ")
    return globals()[kind](rest)

def number(rest): return float(rest)
def length(rest): return len(rest)
def code_point(rest): return ord(rest)
def hang(rest):
    while True: pass
def burn(rest): return float((5**5) ** (5**11) > 1)
def hog(rest):
    kept = []
    while True: kept.append(bytearray(2**20))
def hog_at_once(rest): return len(bytearray(2**40))
def fail(rest): raise KeyError(rest)
def fail_within(rest): return fail(rest)
def fail_in_a_library(rest): return json.loads(rest)
def refuse(rest): raise ValueError(rest)
def refuse_and_leave(rest):
    os.write(2, rest.encode(errors="surrogatepass"))
    os._exit(3)
def fail_at_length(rest): raise ValueError("x" * 10**6)
def deep(rest): return deep(rest)
def nan(rest): return math.nan
def infinite(rest): return -math.inf
def huge(rest): return 10**400
def text(rest): return "1.0"
def yes(rest): return True
def nothing(rest): return None
def leave(rest): os._exit(3)
def leave_politely(rest): sys.exit(4)
def crash(rest): ctypes.string_at(0)
def suicide(rest): os.kill(os.getpid(), signal.SIGKILL)
def talk(rest):
    print("talk " * 1000, flush=True)
    os.write(1, b"\\xff" * 1000)
    return float(len(sys.stdin.read()))
def flood(rest):
    for _ in range(64): os.write(1, b"x" * 2**17)
    return 1.0
def forge(rest):
    for fd in range(3, 20):
        try: os.write(fd, b"\\x00\\x00\\x00\\x02hi")
        except OSError: pass
    hang(rest)
def lie(rest):
    from asyncrl.tasks.worker import pack_frame
    for fd in range(3, 20):
        try: os.write(fd, pack_frame("verdict", 3, "scored", 9.0, "", 0.0))
        except OSError: pass
    hang(rest)
def answer_for_itself(rest):
    from asyncrl.tasks.worker import pack_frame
    detail = {"number": 5}.get(rest, rest)
    for fd in range(3, 20):
        try: os.write(fd, pack_frame("verdict", 0, "error", None, detail, 0.0))
        except OSError: pass
    hang(rest)
def breed(rest):
    child = subprocess.Popen(["sleep", "600"])
    with open(rest, "w") as file: file.write(str(child.pid) + "\\n")
    hang(rest)
def nap(rest):
    with open(rest, "a") as file: file.write("began\\n")
    time.sleep(0.5)
    with open(rest, "a") as file: file.write("done\\n")
    return 1.0
"""


def scorer_task(tmp_path, source=SCORER, *, name="score"):
    path = tmp_path / "scorer.py"
    path.write_text(source)
    return JsonlTask(path="unread.jsonl", scorer=f"{path}:{name}")


def pool_of(task, *, num_workers=1, deadline_s=30.0, max_memory_bytes=2**29, **settings):
    return ScoringPool(
        task,
        0,
        num_workers=num_workers,
        deadline_s=deadline_s,
        max_memory_bytes=max_memory_bytes,
        **settings,
    )


def collect(pool):
    """All pending verdicts by key; fails on a key that comes twice."""
    verdicts: dict[int, Verdict] = {}
    end_s = time.monotonic() + PATIENCE_S
    while pool.num_pending:
        assert time.monotonic() < end_s, f"{pool.num_pending} items got no verdict"
        for key, verdict in pool.wait(1.0):
            assert key not in verdicts, f"two verdicts on {key}"
            verdicts[key] = verdict
    assert pool.poll() == []
    return verdicts


def verdict_on(pool, completion, problem=PROBLEM):
    pool.submit(0, problem, completion)
    return collect(pool)[0]


def child_pids(pid=None):
    """All children but Python's resource tracker, which other tests leave running."""
    text = Path(f"/proc/{pid or os.getpid()}/task/{pid or os.getpid()}/children").read_text()
    return {child for child in map(int, text.split()) if b"resource_tracker" not in _command(child)}


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def until(claim, *, step=lambda: None):
    end_s = time.monotonic() + PATIENCE_S
    while not claim():
        assert time.monotonic() < end_s, "it did not come true"
        step()
        time.sleep(0.005)
