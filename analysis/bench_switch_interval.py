"""What sys.setswitchinterval does to a fetch beside a loop that holds the GIL.

    python analysis/bench_switch_interval.py [--rounds 40]

The main thread plays an engine's host loop: 12 ms of Python, then 3 ms in which it waits for the GPU.
Another one hears of versions, as the mailbox's does, and the real Subscriber fetches them, 37 MB in 420
tensors (an adapter of rank 16 of a 1.4B model), from shared memory in its own thread. Python hands the
GIL over after the switch interval (5 ms unless it is set), and the fetch needs it some dozen times. A
case is an interval, and one while a version is fetched. Cases take turns round by round, so that whatever
else the machine does falls on all of them.

| value     | meaning                                                                              |
|-----------|--------------------------------------------------------------------------------------|
| ready_ms  | from the news to the step that finds the version ready, median over rounds           |
| stage_ms  | the fetch itself                                                                     |
| slower    | time of a step while a version is fetched / without, mean                            |
| lost_ms   | what these steps took longer in all, a version, median: what the loop loses          |
"""

import argparse
import json
import queue
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch

from asyncrl.telemetry.provenance import provenance
from asyncrl.weights import switching
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import Snapshotter
from asyncrl.weights.staging import DeviceStaging
from asyncrl.weights.subscriber import Subscriber
from asyncrl.wire.messages import Announcement

CASES_S = ((0.005, 0.005), (0.001, 0.001), (0.0002, 0.0002), (0.005, 0.001), (0.005, 0.0002))
"""The interval, and the one while a version is fetched."""

NUM_TENSORS, NUM_VALUES = 420, 22_000
_HOST_S, _DEVICE_S = 0.012, 0.003


def calibrate() -> int:
    """Turns of the host loop in _HOST_S, alone."""
    turns, until_s = 0, time.perf_counter() + 1.0
    while time.perf_counter() < until_s:
        turns += len([i for i in range(100)]) // 100  # noqa: C416  (a little of what Python does)
    return int(turns * _HOST_S)


def step(turns: int) -> float:
    """One step of the engine; seconds."""
    began_s = time.perf_counter()
    done = 0
    while done < turns:
        time.perf_counter()
        done += len([i for i in range(100)]) // 100  # noqa: C416
    time.sleep(_DEVICE_S)
    return time.perf_counter() - began_s


News = queue.SimpleQueue[Announcement | None]


def hear(subscriber: Subscriber, news: News) -> None:
    """Start the fetch of what is announced, until None is."""
    while (announcement := news.get()) is not None:
        subscriber.start(announcement)


def measure(
    subscriber: Subscriber, news: News, announcement: Announcement, turns: int
) -> dict[str, float]:
    """Fetch one version beside the loop."""
    alone = statistics.fmean(step(turns) for _ in range(4))
    began_s, steps = time.monotonic(), []
    news.put(announcement)
    while (staged := subscriber.ready()) is None:
        steps.append(step(turns))
    ready_s = time.monotonic() - began_s
    staged.release()
    return {
        "ready_ms": 1e3 * ready_s,
        "stage_ms": 1e3 * (staged.end_s - staged.start_s),
        "slower": statistics.fmean(steps) / alone if steps else 1.0,
        "lost_ms": 1e3 * (sum(steps) - alone * len(steps)),
    }


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description="fetch latency by switch interval")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--out", type=Path, default=Path("analysis/results/switch_interval_cpu.json")
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-bench-", dir="/dev/shm"))
    announced = []
    publisher = Publisher(
        transport="shm", shm_dir=folder, on_published=announced.append, run_id="bench", epoch=0,
        chunk_bytes=2**22,
    )  # fmt: skip
    tensors = [(f"t{i}", torch.randn(NUM_VALUES)) for i in range(NUM_TENSORS)]
    snapshotter = Snapshotter(tensors, dtype=None, buffers=publisher.buffers)
    subscriber = Subscriber("bench", shm_dir=folder, staging=DeviceStaging(torch.device("cpu")))
    found: dict[tuple[float, float], dict[str, list[float]]] = {
        case: defaultdict(list) for case in CASES_S
    }
    news: News = queue.SimpleQueue()
    ear = threading.Thread(target=hear, args=(subscriber, news))
    ear.start()
    turns = calibrate()
    for version in range(options.rounds * len(CASES_S)):
        case = CASES_S[version % len(CASES_S)]
        sys.setswitchinterval(case[0])
        switching.INTERVAL_S = case[1]
        num_announced = len(announced)
        snapshot = snapshotter.take(version)
        assert snapshot is not None
        publisher.publish(snapshot)
        while len(announced) == num_announced:
            time.sleep(0.001)
        for name, value in measure(subscriber, news, announced[-1], turns).items():
            found[case][name].append(value)
    news.put(None)
    ear.join()
    subscriber.close()
    publisher.close()
    shutil.rmtree(folder)
    rows = [
        {
            "interval_ms": 1e3 * case[0],
            "while_fetching_ms": 1e3 * case[1],
            "ready_ms": round(statistics.median(mine["ready_ms"]), 2),
            "stage_ms": round(statistics.median(mine["stage_ms"]), 2),
            "slower": round(statistics.fmean(mine["slower"]), 3),
            "lost_ms": round(statistics.median(mine["lost_ms"]), 2),
        }
        for case, mine in found.items()
    ]
    result = provenance() | {"seed": None, "rounds": options.rounds, "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
