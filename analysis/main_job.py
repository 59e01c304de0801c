"""Runs one configuration with several seeds and records what was achieved.

    python analysis/main_job.py --config launch/reverse_digits_cpu.toml --seeds 0 1 2 \
        --out analysis/results/main_job_cpu.json [section.key=value ...]

The result holds provenance and one entry per seed: held_out_before, held_out_after, train_minutes, steps,
k, max_staleness, and the peak memory of all processes together.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from asyncrl.config import read_config
from asyncrl.telemetry.provenance import provenance


def main() -> None:
    """Run every seed in turn, write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="run folder (one seed); by default a new one")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    config = read_config(options.config, options.overrides)
    result: dict[str, Any] = provenance() | {
        "config_file": str(options.config),
        "overrides": options.overrides,
        "config": config.model_dump(mode="json"),
        "runs": [],
    }
    for seed in options.seeds:
        result["runs"].append(run_seed(options.config, seed, options.overrides, options.keep))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["runs"][-1]))


def run_seed(config: Path, seed: int, overrides: list[str], keep: Path | None) -> dict[str, Any]:
    """One run in a folder of its own; its entry in the result."""
    run_dir = keep or Path(tempfile.mkdtemp(prefix=f"main-job-{seed}-")) / "run"
    command = [
        sys.executable, "-m", "asyncrl", "run", str(config), *overrides, f"seed={seed}",
        f'run_dir="{run_dir}"',
    ]  # fmt: skip
    process = subprocess.Popen(command)
    peak = PeakMemory(process.pid)
    code = process.wait()
    peak.stop()
    if code != 0:
        raise SystemExit(f"seed {seed} failed with exit code {code}; see {run_dir}")
    entry = json.loads((run_dir / "summary.json").read_text())
    settings = read_config(config, overrides)
    return {
        "seed": seed,
        "k": settings.pipeline.max_staleness,
        **entry,
        "peak_memory_bytes": peak.bytes,
        "started": json.loads((run_dir / "run.json").read_text())["started"],
    }


class PeakMemory:
    """Watches the proportional set size (shared pages counted once) of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._done = threading.Event()
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(2.0):
            self.bytes = max(self.bytes, sum(map(proportional_bytes, self._family())))

    def _family(self) -> list[int]:
        parents: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        family, stack = [self._pid], [self._pid]
        while stack:
            children = parents.get(stack.pop(), [])
            family += children
            stack += children
        return family


def proportional_bytes(pid: int) -> int:
    """Pss of a process, 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
