"""The order in which processes of a run are told to end."""

import subprocess
import sys

from asyncrl.child import Child, stop

PROGRAM = """
import pathlib, signal, sys, time
ends, name = pathlib.Path(sys.argv[1]), sys.argv[2]

def end(*_):
    deadline_s = time.monotonic() + 0.5
    while name != "broker" and not ends.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with ends.open("a") as file:
        file.write(name + " ")
    sys.exit()

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""
"""Leaves its name when it ends; all but the broker look half a second whether somebody else does."""


def test_the_broker_is_there_until_the_others_have_left(tmp_path):
    children = []
    for name in ("broker", "learner"):
        child = Child(name, [], [0], None, 0)
        child.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "ends"), name],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.process.stdout.readline() == b"ready\n"
        children.append(child)
    stop(children)
    for child in children:
        child.process.stdout.close()
    assert (tmp_path / "ends").read_text().split() == ["learner", "broker"]
    assert [child.process.returncode for child in children] == [0, 0]
