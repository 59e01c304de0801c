"""The daemons that let the engines of one GPU run side by side, with a stand-in for NVIDIA's program."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl import mps
from asyncrl.child import Child
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.mps import GpuSharing, MpsDaemon
from tests.unit.nvidia_mps import install


@pytest.fixture(autouse=True)
def _no_other_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mps.PIPES, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts the stand-in on the PATH."""

    def put(**options: str) -> None:
        install(tmp_path / "bin", **options)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return put


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Callable[..., GpuSharing]]:
    made = []

    def make(
        said: list[str] | None = None, visible: tuple[str, ...] = ("4", "5"), **engine: object
    ) -> GpuSharing:
        config = RunConfig.model_validate(
            {"model": {"path": "m"}, "task": {"kind": "repeat_letter"}}
            | {"engine": {"kind": "vllm", "engines_per_gpu": 2} | engine}
        )  # fmt: skip
        say = (said if said is not None else []).append
        made.append(GpuSharing(config, visible, tmp_path / "logs", say))
        return made[-1]

    yield make
    for one in made:
        one.close()


def daemon_of(environment: dict[str, str]) -> tuple[int, str]:
    """Process id and GPUs of the stand-in that serves clients with these variables."""
    pid, gpus = json.loads(Path(environment[mps.PIPES], "control").read_text())
    return pid, gpus


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Whether it ends within ten seconds."""
    deadline_s = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not is_running(pid)


def test_engines_of_a_place_share_a_daemon_and_places_do_not(
    program: Callable[..., None], sharing: Callable[..., GpuSharing]
) -> None:
    program()
    of = sharing()
    first, second, third = of.environment(["4"]), of.environment(["4"]), of.environment(["5", "6"])
    assert first == second
    assert first[mps.PIPES] != third[mps.PIPES]
    # A daemon is given the host's names; its clients count from 0.
    assert [daemon_of(first)[1], daemon_of(third)[1]] == ["4", "5,6"]
    assert [first["CUDA_VISIBLE_DEVICES"], third["CUDA_VISIBLE_DEVICES"]] == ["0", "0,1"]


def test_a_single_gpu_is_shared_by_its_name(
    program: Callable[..., None], sharing: Callable[..., GpuSharing]
) -> None:
    program()
    environment = sharing(visible=("GPU-5d",)).environment(None)
    assert daemon_of(environment)[1] == "GPU-5d"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_at_the_end_daemon_server_and_folder_are_gone_and_what_they_wrote_is_kept(
    program: Callable[..., None], sharing: Callable[..., GpuSharing], tmp_path: Path
) -> None:
    program()
    of = sharing()
    environment = of.environment(["4"])
    pid, _ = daemon_of(environment)
    server = int(Path(environment[mps.PIPES], "server").read_text())
    assert is_running(pid)
    assert is_running(server)
    of.close()
    assert ends(server)
    assert not is_running(pid)
    assert not Path(environment[mps.PIPES]).exists()
    assert "the control's own words" in (tmp_path / "logs" / "mps-4.log").read_text()


def test_a_killed_supervisor_leaves_no_daemon(program: Callable[..., None], tmp_path: Path) -> None:
    program()
    source = (
        "import json, sys, time; from pathlib import Path; from asyncrl.mps import *\n"
        "d = MpsDaemon(['0'], Path(sys.argv[1])); print(d.client_environment[PIPES], flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pid, _ = daemon_of({mps.PIPES: supervisor.stdout.readline().strip()})
        assert is_running(pid)
        supervisor.kill()
    assert ends(pid)


@pytest.mark.parametrize(
    ("visible", "engine"),
    [
        (("4",), {"engines_per_gpu": 1}),
        (("4",), {"mps": "off"}),
        ((), {}),
    ],
)
def test_nothing_is_started_that_no_engine_needs(
    visible: tuple[str, ...],
    engine: dict[str, object],
    program: Callable[..., None],
    sharing: Callable[..., GpuSharing],
) -> None:
    program(first="raise SystemExit('started')")
    said: list[str] = []
    assert sharing(said, visible, **engine).environment(None) == {}
    assert said == []


def test_a_daemon_of_the_host_is_used_as_it_is(
    program: Callable[..., None],
    sharing: Callable[..., GpuSharing],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program()
    daemon = MpsDaemon(["0"], tmp_path)
    monkeypatch.setenv(mps.PIPES, daemon.client_environment[mps.PIPES])
    said: list[str] = []
    assert sharing(said, mps="on").environment(["4"]) == {}
    assert said == []
    daemon.close()


def test_without_the_program_engines_take_turns_or_the_run_is_refused(
    sharing: Callable[..., GpuSharing], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    of = sharing(said)
    assert of.environment(["4"]) == {}
    assert of.environment(["4"]) == {}
    assert said == [
        "engines of one GPU will take turns on it (no MPS): nvidia-cuda-mps-control is not on the PATH"
    ]
    with pytest.raises(ConfigError, match=r'engine\.mps="on": .* not on the PATH; set it to "off"'):
        sharing(mps="on").environment(["4"])
    with pytest.raises(ConfigError, match="no GPU is visible"):
        sharing(visible=(), mps="on").environment(None)


def test_a_daemon_that_ends_has_its_last_words_told(
    program: Callable[..., None], sharing: Callable[..., GpuSharing]
) -> None:
    program(first="print('no permission'); sys.exit(3)")
    said: list[str] = []
    assert sharing(said).environment(["4"]) == {}
    assert "ended with exit code 3: no permission" in said[0]
    with pytest.raises(ConfigError, match="ended with exit code 3: no permission"):
        sharing(mps="on").environment(["4"])


def test_a_server_that_does_not_serve_is_no_server(
    program: Callable[..., None],
    sharing: Callable[..., GpuSharing],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program(status="Fault")
    monkeypatch.setattr(mps, "_START_S", 0.5)
    said: list[str] = []
    assert sharing(said).environment(["4"]) == {}
    assert "has no server after 0.5 s: the control's own words" in said[0]


def test_a_process_gets_variables_of_its_own(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['A'])",
    ]
    child = Child("c", command, [0], ["7"], 0, environment={"A": "b", "CUDA_VISIBLE_DEVICES": "0"})
    child.spawn(tmp_path, pin=False)
    assert child.wait(limit_s=30) == 0
    assert (tmp_path / "logs" / "c.log").read_text() == "0 b\n"
