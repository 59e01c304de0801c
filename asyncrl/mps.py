"""NVIDIA's Multi-Process Service (MPS) for the engines of one GPU: their kernels run side by side.

Without it a GPU serves one process at a time. With it the processes are clients of one server, which has
the GPU's only context: engines of 1.4B parameters sample 1.2 to 1.4 times as much (analysis/LOG.md).

    supervisor -> keeper -> nvidia-cuda-mps-control -f -> nvidia-cuda-mps-server <- generators of a place

There is one control daemon for each set of GPUs that has several engines, with a folder of sockets of its
own, so nobody else on the host is touched; where a daemon is there already, it is used as it is. Clients
count the GPUs of their daemon from 0. The learner is no client: a fault on the GPU that is not contained
ends all engines of the place (the supervisor starts them again), but not it. If a daemon ends before its
run, engines that start later are no clients, and know their GPUs as the host does.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from asyncrl.config import RunConfig, VllmEngineConfig
from asyncrl.errors import ConfigError, DeviceError
from asyncrl.family import die_with_parent

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"

_START_S = 20.0
_ANSWER_S = 5.0
_END_S = 3.0
"""For a daemon to end by itself; with what is killed before, the end of a run stays under 10 s."""

_POLL_S = 0.1

_MAX_TEMP = 60
"""Bytes of the path of a temporary folder: that of a socket in a folder in it must not exceed 107."""


class GpuSharing:
    """The daemons of one run, started as its engines are."""

    def __init__(
        self, config: RunConfig, visible: Sequence[str], log_dir: Path, say: Callable[[str], None]
    ) -> None:
        """Nothing is started yet.

        Args:
            config: engine.mps and engine.engines_per_gpu decide.
            visible: GPUs of this host that the run may use, by the names of CUDA_VISIBLE_DEVICES.
            log_dir: where the daemons write.
            say: tells the user why engines that could share a GPU will take turns.
        """
        self._engine = config.engine
        self._is_shared = config.engines_per_place > 1
        self._visible = visible
        self._log_dir = log_dir
        self._say = say
        self.is_on = False
        """Whether engines are clients: of daemons of this run, or of one that the host had already."""

        self._failure = ""
        self._daemons: dict[tuple[str, ...], MpsDaemon] = {}
        self._environments: dict[tuple[str, ...], dict[str, str]] = {}

    def environment(self, gpus: Sequence[str] | None) -> dict[str, str]:
        """Variables of an engine on these GPUs (None: all that are visible); empty without MPS.

        All engines of a place have the same dict, which `check` empties when their daemon has ended.

        Raises:
            ConfigError: engine.mps="on", and there is no MPS.
        """
        engine = self._engine
        if not isinstance(engine, VllmEngineConfig) or engine.mps == "off":
            return {}
        if engine.mps == "auto" and not (self._is_shared and self._visible):
            return {}
        place = tuple(gpus or self._visible)
        if place not in self._environments:
            self._environments[place] = self._start(place, is_needed=engine.mps == "on")
        return self._environments[place]

    def check(self) -> None:
        """See which daemons have ended: a client that finds none takes GPU 0, whosever that is."""
        for place, daemon in self._daemons.items():
            if self._environments.get(place) and (end := daemon.end()):
                self._environments[place].clear()
                self._say(f"engines that start again will take turns on {_names(place)}: {end}")

    def close(self) -> None:
        """End the daemons, all at once; their clients have ended before."""
        if self._daemons:
            with ThreadPoolExecutor(len(self._daemons)) as pool:
                list(pool.map(MpsDaemon.close, self._daemons.values()))
        self._daemons.clear()

    def _start(self, place: tuple[str, ...], *, is_needed: bool) -> dict[str, str]:
        if not self._failure and is_there_already():
            self.is_on = True
            return {}
        if not self._failure:
            daemon = self._daemons[place] = MpsDaemon(place, self._log_dir)
            try:
                daemon.start()
            except (DeviceError, OSError) as error:
                daemon.close()
                del self._daemons[place]
                self._failure = str(error)  # the next place would wait as long for the same
            else:
                self.is_on = True
                return daemon.client_environment
        if is_needed:
            raise ConfigError(f'engine.mps="on": {self._failure}; set it to "off"')
        self._say(f"engines will take turns on {_names(place)} (no MPS): {self._failure}")
        return {}


def _names(place: Sequence[str]) -> str:
    return f"GPU {', '.join(place)}"


def is_there_already() -> bool:
    """Whether this host has a daemon that every CUDA process is a client of anyhow."""
    if pipes := os.environ.get(PIPES):  # in a container perhaps without the program
        return Path(pipes, "control").exists()
    if shutil.which(CONTROL) is None:
        return False
    return _ask("get_server_list", os.environ, limit_s=_ANSWER_S) is not None


def _ask(command: str, environment: Mapping[str, str], *, limit_s: float) -> str | None:
    """What the daemon of `environment` answers; None if there is none, or it does not."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout if done.returncode == 0 else None


class MpsDaemon:
    """A control daemon in the foreground, under a keeper (keeper.py), and its server."""

    def __init__(self, gpus: Sequence[str], log_dir: Path) -> None:
        """Nothing is started yet; what `start` makes, even in part, `close` removes."""
        self._gpus = gpus
        self._log = log_dir / f"mps-{'-'.join(gpus[:1]).replace('/', '-')}.log"
        self._pipes = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # behind what an earlier attempt of the run left

    def start(self) -> None:
        """Start both, and wait until clients are served.

        Raises:
            DeviceError: they do not start; the message says why.
            OSError: nor can they.
        """
        if not self._gpus:
            raise DeviceError("no GPU is visible")
        if shutil.which(CONTROL) is None:
            raise DeviceError(f"{CONTROL} is not on the PATH")
        # The paths of sockets are short; a run's folder may lie deep.
        temp = tempfile.gettempdir()
        self._pipes = tempfile.mkdtemp(
            prefix="asyncrl-mps-", dir=temp if len(os.fsencode(temp)) <= _MAX_TEMP else "/tmp"
        )
        self.client_environment = {
            PIPES: self._pipes,
            "CUDA_VISIBLE_DEVICES": ",".join(str(i) for i in range(len(self._gpus))),
        }
        self._environment = os.environ | {
            PIPES: self._pipes,
            "CUDA_MPS_LOG_DIRECTORY": self._pipes,
            "CUDA_VISIBLE_DEVICES": ",".join(self._gpus),
        }
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.keeper", self._pipes, CONTROL, "-f"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        self._await_server()

    def end(self) -> str:
        """How the daemon has ended by itself; empty while it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return ""
        return f"{CONTROL} ended with exit code {code}: {self._last_words()}"

    def close(self) -> None:
        """End daemon and server, and remove their files."""
        if self._process is not None:
            until_s = time.monotonic() + _END_S
            if self._process.poll() is None:
                self._tell("quit", until_s)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, until_s - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # ends the server with it
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._pipes:
            # A full disk is another one's failure.
            with contextlib.suppress(OSError), self._log.open("ab") as kept:
                for words in sorted(Path(self._pipes).glob("*.log")):
                    kept.write(words.read_bytes())
            shutil.rmtree(self._pipes, ignore_errors=True)

    def _await_server(self) -> None:
        """Have the server started; by itself it starts with its first client, who would see it fail."""
        until_s = time.monotonic() + _START_S
        while True:
            if end := self.end():
                raise DeviceError(end)
            servers = self._tell("get_server_list", until_s).split()
            if not servers:
                self._tell(f"start_server -uid {os.getuid()}", until_s)
            elif "ACTIVE" in self._tell(f"get_server_status {servers[0]}", until_s).upper():
                return
            if time.monotonic() > until_s:
                raise DeviceError(
                    f"{CONTROL} has no server after {_START_S:g} s: {self._last_words()}"
                )
            time.sleep(_POLL_S)

    def _tell(self, command: str, until_s: float) -> str:
        limit_s = max(_POLL_S, min(_ANSWER_S, until_s - time.monotonic()))
        return _ask(command, self._environment, limit_s=limit_s) or ""

    def _last_words(self) -> str:
        words = [self._log.read_bytes()[self._log_start :]] if self._log.exists() else []
        words += [path.read_bytes() for path in sorted(Path(self._pipes).glob("*.log"))]
        lines = b"\n".join(words).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
