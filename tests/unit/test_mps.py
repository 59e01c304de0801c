"""The daemons that let the engines of one GPU run side by side, with a stand-in for NVIDIA's program."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
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


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, with a short path, in which no sockets are left."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert not list(Path(folder).glob("asyncrl-mps-*"))


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
    assert of.is_on


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


@pytest.mark.parametrize("session", ["", ", start_new_session=True"])
def test_a_killed_supervisor_leaves_neither_daemon_nor_server_nor_folder(
    session: str, program: Callable[..., None], temp: Path, tmp_path: Path
) -> None:
    program(session=session)
    source = (
        "import json, sys, time; from pathlib import Path; from asyncrl.mps import *\n"
        "d = MpsDaemon(['0'], Path(sys.argv[1])); d.start()\n"
        "print(d.client_environment[PIPES], flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temp)},
    ) as supervisor:
        assert supervisor.stdout is not None
        pipes = supervisor.stdout.readline().strip()
        pid, _ = daemon_of({mps.PIPES: pipes})
        server = int(Path(pipes, "server").read_text())
        assert is_running(pid)
        assert is_running(server)
        supervisor.kill()
    assert ends(pid)
    assert ends(server)
    deadline_s = time.monotonic() + 10
    while Path(pipes).exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


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
    daemon.start()
    monkeypatch.setenv(mps.PIPES, daemon.client_environment[mps.PIPES])
    said: list[str] = []
    of = sharing(said, mps="on")
    assert of.environment(["4"]) == {}
    assert of.is_on
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
        "engines will take turns on GPU 4 (no MPS): nvidia-cuda-mps-control is not on the PATH"
    ]
    assert not of.is_on
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


def test_a_variable_that_names_no_daemon_is_replaced(
    program: Callable[..., None],
    sharing: Callable[..., GpuSharing],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program()
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "ended"))
    assert daemon_of(sharing().environment(["4"]))[1] == "4"


def test_a_place_that_fails_is_not_waited_for_again(
    program: Callable[..., None], sharing: Callable[..., GpuSharing], tmp_path: Path
) -> None:
    program(first=f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); sys.exit(3)")
    said: list[str] = []
    of = sharing(said)
    assert [of.environment([gpu]) for gpu in "456"] == [{}, {}, {}]
    assert (tmp_path / "starts").read_text() == "x"
    assert [line.partition(" (")[0] for line in said] == [
        f"engines will take turns on GPU {gpu}" for gpu in "456"
    ]


def test_a_second_place_that_fails_leaves_the_first_as_it_is(
    program: Callable[..., None], sharing: Callable[..., GpuSharing]
) -> None:
    program()
    said: list[str] = []
    of = sharing(said)
    pid, _ = daemon_of(of.environment(["4"]))
    program(first="sys.exit(3)")
    assert of.environment(["5"]) == {}
    assert is_running(pid)
    assert of.is_on
    assert [line[:34] for line in said] == ["engines will take turns on GPU 5 ("]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"first": r"os.write(1, b'no \xff\n'); sys.exit(3)"}, "exit code 3: no \ufffd"),
        ({"each": r"os.write(1, b'\xff\n')"}, "has no server"),
        ({"each": "sys.exit(7)"}, "has no server"),
        ({"each": "time.sleep(1000)"}, "has no server"),
    ],
)
def test_a_program_that_answers_nonsense_or_nothing_ends_no_run(
    options: dict[str, str],
    words: str,
    program: Callable[..., None],
    sharing: Callable[..., GpuSharing],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program(**options)
    for limit in ("_START_S", "_ANSWER_S", "_END_S"):
        monkeypatch.setattr(mps, limit, 0.5)
    said: list[str] = []
    assert sharing(said).environment(["4"]) == {}
    assert words in said[0]


def test_a_file_that_is_no_program_ends_no_run(
    program: Callable[..., None], sharing: Callable[..., GpuSharing], tmp_path: Path
) -> None:
    program()
    (tmp_path / "bin" / mps.CONTROL).write_bytes(b"\0")
    said: list[str] = []
    assert sharing(said).environment(["4"]) == {}
    assert "Exec format error" in said[0]


def test_what_an_earlier_attempt_wrote_is_no_reason(
    program: Callable[..., None], sharing: Callable[..., GpuSharing], tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mps-4.log").write_text("words of an earlier attempt\n")
    program(first="sys.exit(3)")
    said: list[str] = []
    sharing(said).environment(["4"])
    assert said[0].endswith("ended with exit code 3: it wrote nothing")


def test_a_slash_in_the_name_of_a_gpu_is_none_of_a_folder(
    program: Callable[..., None], sharing: Callable[..., GpuSharing], tmp_path: Path
) -> None:
    program()
    assert sharing(visible=("MIG-GPU-5d/1/0",)).environment(None)
    assert (tmp_path / "logs" / "mps-MIG-GPU-5d-1-0.log").exists()


def test_sockets_get_short_paths_under_a_long_one(
    program: Callable[..., None],
    sharing: Callable[..., GpuSharing],
    temp: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program()
    long = tmp_path / ("t" * 61)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    pipes = Path(sharing().environment(["4"])[mps.PIPES])
    assert pipes.parent == Path("/tmp")


def test_an_interrupt_while_a_daemon_starts_leaves_nothing(
    program: Callable[..., None], sharing: Callable[..., GpuSharing], tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    program(
        first=f"Path({str(note)!r}).write_text(str(os.getpid())); os.kill({os.getpid()}, signal.SIGINT)"
    )
    of = sharing()
    # A shell's background jobs have SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            of.environment(["4"])
    finally:
        signal.signal(signal.SIGINT, before)
    of.close()
    assert not is_running(int(note.read_text()))


def test_a_daemon_that_does_not_quit_is_not_waited_for(
    program: Callable[..., None],
    sharing: Callable[..., GpuSharing],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program(each="command[0] == 'quit' and time.sleep(1000)")
    of = sharing()
    pid, _ = daemon_of(of.environment(["4"]))
    monkeypatch.setattr(mps, "_ANSWER_S", 1000.0)  # more than a test may last
    monkeypatch.setattr(mps, "_END_S", 0.2)
    of.close()
    assert not is_running(pid)


def test_daemons_end_side_by_side(
    program: Callable[..., None], sharing: Callable[..., GpuSharing], tmp_path: Path
) -> None:
    """Each is told to quit only when the other is told so, too."""
    (tmp_path / "told").mkdir()
    program(
        each=f"told = Path({str(tmp_path / 'told')!r})\n"
        "if command[0] == 'quit':\n"
        "    (told / str(os.getpid())).touch()\n"
        "    while len(list(told.iterdir())) < 2: time.sleep(0.01)"
    )
    of = sharing()
    of.environment(["4"]), of.environment(["5"])
    of.close()
    for gpu in "45":
        assert "told to quit" in (tmp_path / "logs" / f"mps-{gpu}.log").read_text()


def test_the_end_needs_no_folder_for_logs(
    program: Callable[..., None], sharing: Callable[..., GpuSharing], tmp_path: Path
) -> None:
    program()
    of = sharing()
    pid, _ = daemon_of(of.environment(["4"]))
    shutil.rmtree(tmp_path / "logs")
    of.close()
    assert not is_running(pid)


def test_engines_of_a_daemon_that_ended_start_again_without_it(
    program: Callable[..., None], sharing: Callable[..., GpuSharing]
) -> None:
    program()
    said: list[str] = []
    of = sharing(said)
    first, second = of.environment(["4"]), of.environment(["5"])
    of.check()
    assert said == []
    pid, _ = daemon_of(first)
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while first and time.monotonic() < deadline_s:
        of.check()
        time.sleep(0.01)
    of.check()
    assert first == of.environment(["4"]) == {}
    assert second != {}
    assert said == [
        "engines that start again will take turns on GPU 4: nvidia-cuda-mps-control ended with exit "
        "code 137: the control's own words"
    ]


@pytest.mark.parametrize("kind", ["hf", None])
def test_another_kind_of_engine_has_no_such_setting(kind: str | None) -> None:
    engine = {"mps": "on"} | ({"kind": kind} if kind else {})
    with pytest.raises(ValueError, match=r"engine\.hf\.mps\n.*Extra inputs are not permitted"):
        RunConfig.model_validate(
            {"model": {"path": "m"}, "task": {"kind": "repeat_letter"}, "engine": engine}
        )


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


SUPERVISE = """
import sys
from pathlib import Path
from asyncrl import attempt
from asyncrl.config import RunConfig
from asyncrl.supervise import Supervisor
config = RunConfig.model_validate_json(sys.argv[1])
run_dir = Path(sys.argv[2])
sys.exit(Supervisor(config, run_dir, attempt.begin(run_dir, config), say=print).run())
"""


@pytest.fixture
def run(tmp_path: Path, temp: Path) -> Callable[[], subprocess.Popen[str]]:
    """Starts a supervisor of two engines on GPU 4, without a look at what is installed."""

    def start() -> subprocess.Popen[str]:
        (tmp_path / "run").mkdir()
        config = {
            "model": {"path": str(tmp_path / "no model")},
            "task": {"kind": "repeat_letter"},
            "engine": {"kind": "vllm", "engines_per_gpu": 2},
        }
        return subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, json.dumps(config), str(tmp_path / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"TMPDIR": str(temp), "CUDA_VISIBLE_DEVICES": "4"},
        )

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_ends_while_its_daemon_starts_leaves_nothing(
    program: Callable[..., None],
    run: Callable[[], subprocess.Popen[str]],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    note = tmp_path / "pid"
    program(first=f"Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(1000)")
    with run() as process:
        while not (note.exists() and note.read_text()) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not is_running(int(note.read_text()))


def test_a_run_ends_its_daemon_and_has_it_on_record(
    program: Callable[..., None], run: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """It fails, for there is no model, nor perhaps vLLM."""
    program(first=f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))")
    with run() as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["mps"] is True
    assert not is_running(int((tmp_path / "pid").read_text()))
