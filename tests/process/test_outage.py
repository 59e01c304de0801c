"""A logging host that cannot be reached costs training nothing (F087)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PROGRAM = """
import sys, time
from pathlib import Path
from asyncrl.telemetry.sinks import WandbSink
sink = WandbSink(mode="online", project="p", name="n", run_id="r", config={}, folder=Path(sys.argv[1]))
slowest = 0.0
for step in range(5000):  # more than the queue holds
    start = time.perf_counter()
    sink.write({"step": step})
    slowest = max(slowest, time.perf_counter() - start)
sink.close()
print(slowest, sink.num_dropped)
"""


def test_an_unreachable_logging_host_neither_blocks_a_step_nor_the_end(tmp_path: Path) -> None:
    environment = os.environ | {
        "WANDB_BASE_URL": "http://127.0.0.1:9",  # the discard port: refused at once
        "WANDB_API_KEY": "0" * 40,
        "WANDB_SILENT": "true",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    slowest, num_dropped = done.stdout.split()[-2:]
    assert float(slowest) < 1.0  # a step's write never waits for the network
    assert int(num_dropped) >= 3000  # what the queue of 1000 could not hold is counted
