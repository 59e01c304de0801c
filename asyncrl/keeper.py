"""A process between the supervisor and a program that starts others: all of them end with the run.

    supervisor -> python -m asyncrl.keeper FOLDER PROGRAM ARGUMENT ... -> the program -> its processes

What a killed program leaves behind would go to init. The keeper inherits it, and is told by the kernel
(SIGTERM) that the supervisor has ended, even by SIGKILL: it kills what is left and removes the folder.
Of a program that ends by itself it only hands on the exit code, 128 + n after signal n.
"""

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from types import FrameType

from asyncrl.family import die_with_parent, inherit_orphans, kill_orphans


def main(folder: str, command: list[str]) -> int:
    """Run `command` to its end, or to that of the supervisor; the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    inherit_orphans()
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        code = program.wait()
    except SystemExit:
        kill_orphans(set())
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return code if code >= 0 else 128 - code


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
