"""Where a result comes from: commit, command, hardware, versions, start time."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("asyncrl", "torch", "transformers", "vllm", "pyzmq", "msgpack", "numpy", "pydantic")


def provenance() -> dict[str, Any]:
    """Commit, dirty flag, command, hardware, library versions and UTC start of this process."""
    folder = Path(__file__).resolve().parent
    return {
        "commit": _git(folder, "rev-parse", "HEAD"),
        "dirty": bool(_git(folder, "status", "--porcelain")),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, and GPUs by name."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(folder: Path, *arguments: str) -> str:
    return _run(["git", "-C", str(folder), *arguments])


def _run(command: list[str]) -> str:
    """Standard output, or "" when the program is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
