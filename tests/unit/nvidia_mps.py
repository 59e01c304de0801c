"""A stand-in for nvidia-cuda-mps-control, which needs a GPU: the same commands, the same life."""

import stat
import sys
from pathlib import Path

_PROGRAM = """#!{python} -IS
import json, os, signal, subprocess, sys, time
from pathlib import Path
pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent"))
control, wanted, server, last = (pipes / name for name in ("control", "wanted", "server", "quit"))
if sys.argv[1:] == ["-f"]:
    {first}
    Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").write_text("the control's own words\\n")
    control.write_text(json.dumps([os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]]))
    child = None
    while not last.exists():
        if wanted.exists() and child is None:
            child = subprocess.Popen(["sleep", "1000"]{session})
            server.write_text(str(child.pid))
        time.sleep(0.01)
    print("told to quit", flush=True)
    if child is not None:
        child.kill()
    control.unlink()
    sys.exit(0)
command = sys.stdin.read().split()
{each}
if not control.exists():
    print("Cannot find MPS control daemon process")
    sys.exit(1)
if command[0] == "start_server":
    assert command[1:] == ["-uid", str(os.getuid())]
    wanted.touch()
elif command[0] == "get_server_list" and server.exists():
    print(server.read_text())
elif command[0] == "get_server_status":
    print("{status}" if command[1] == server.read_text() else "unknown PID")
elif command[0] == "quit":
    last.touch()
"""


def install(
    folder: Path,
    *,
    first: str = "pass",
    each: str = "pass",
    status: str = "Active",
    session: str = "",
) -> None:
    """Write it to `folder`, which belongs on the PATH.

    Args:
        folder: is made.
        first: a statement that the daemon begins with.
        each: a statement before the answer to each command, which is `command`, a list of words.
        status: of its server.
        session: more arguments of the Popen that starts the server.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(
        _PROGRAM.replace("{python}", sys.executable)
        .replace("{first}", first)
        .replace("{each}", each)
        .replace("{status}", status)
        .replace("{session}", session)
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
