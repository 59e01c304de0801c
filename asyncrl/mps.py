"""NVIDIA's Multi-Process Service (MPS) for the engines of one GPU: their kernels run side by side.

Without it a GPU serves one process at a time. With it the processes are clients of one server, which has
the GPU's only context: engines of 1.4B parameters sample 1.2 to 1.4 times as much (analysis/LOG.md).

    supervisor -> nvidia-cuda-mps-control -f -> nvidia-cuda-mps-server <- generators of that place

There is one control daemon for each set of GPUs that has several engines, with a folder of sockets of its
own, so nobody else on the host is touched; where a daemon is there already, it is used as it is. Clients
count the GPUs of their daemon from 0. The learner is no client: a fault on the GPU ends all engines of
the place (the supervisor starts them again, and the server waits until all have gone), but not it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from asyncrl.config import RunConfig, VllmEngineConfig
from asyncrl.errors import ConfigError, DeviceError
from asyncrl.family import die_with_parent

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"

_START_S = 20.0
_ANSWER_S = 5.0
_POLL_S = 0.1


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
        self._daemons: list[MpsDaemon] = []
        self._environments: dict[tuple[str, ...], dict[str, str]] = {}

    def environment(self, gpus: Sequence[str] | None) -> dict[str, str]:
        """Variables of an engine on these GPUs (None: all that are visible); empty without MPS.

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

    def close(self) -> None:
        """End the daemons; their clients have ended before."""
        while self._daemons:
            self._daemons.pop().close()

    def _start(self, place: tuple[str, ...], *, is_needed: bool) -> dict[str, str]:
        if is_there_already():
            return {}
        try:
            daemon = MpsDaemon(place, self._log_dir)
        except (DeviceError, OSError) as error:
            if is_needed:
                raise ConfigError(f'engine.mps="on": {error}; set it to "off"') from error
            self._say(f"engines of one GPU will take turns on it (no MPS): {error}")
            return {}
        self._daemons.append(daemon)
        return daemon.client_environment


def is_there_already() -> bool:
    """Whether this host has a daemon that every CUDA process is a client of anyhow."""
    if PIPES in os.environ:
        return True
    return shutil.which(CONTROL) is not None and _ask("get_server_list", os.environ) is not None


def _ask(command: str, environment: Mapping[str, str]) -> str | None:
    """What the daemon of `environment` answers; None if there is none, or it does not."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


class MpsDaemon:
    """A control daemon in the foreground, a child of this process, and its server."""

    def __init__(self, gpus: Sequence[str], log_dir: Path) -> None:
        """Start both for `gpus`, and wait until clients are served.

        Raises:
            DeviceError: they do not start; the message says why.
        """
        if not gpus:
            raise DeviceError("no GPU is visible")
        if shutil.which(CONTROL) is None:
            raise DeviceError(f"{CONTROL} is not on the PATH")
        # The paths of sockets are short (107 bytes); a run's folder may lie deep.
        self._pipes = tempfile.mkdtemp(prefix="asyncrl-mps-")
        self.client_environment = {
            PIPES: self._pipes,
            "CUDA_VISIBLE_DEVICES": ",".join(str(i) for i in range(len(gpus))),
        }
        self._log = log_dir / f"mps-{gpus[0]}.log"
        self._environment = os.environ | {
            PIPES: self._pipes,
            "CUDA_MPS_LOG_DIRECTORY": self._pipes,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        log_dir.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [CONTROL, "-f"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        try:
            self._await_server()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End daemon and server, and remove their files."""
        if self._process.poll() is None:
            self._tell("quit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ANSWER_S)
        with contextlib.suppress(ProcessLookupError):  # ends the server with it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._log.open("ab") as kept:
            for words in sorted(Path(self._pipes).glob("*.log")):
                kept.write(words.read_bytes())
        shutil.rmtree(self._pipes, ignore_errors=True)

    def _await_server(self) -> None:
        """Have the server started; by itself it starts with its first client, who would see it fail."""
        deadline_s = time.monotonic() + _START_S
        while True:
            if (code := self._process.poll()) is not None:
                raise DeviceError(f"{CONTROL} ended with exit code {code}: {self._last_words()}")
            servers = self._tell("get_server_list").split()
            if not servers:
                self._tell(f"start_server -uid {os.getuid()}")
            elif "ACTIVE" in self._tell(f"get_server_status {servers[0]}").upper():
                return
            if time.monotonic() > deadline_s:
                raise DeviceError(
                    f"{CONTROL} has no server after {_START_S:g} s: {self._last_words()}"
                )
            time.sleep(_POLL_S)

    def _tell(self, command: str) -> str:
        return _ask(command, self._environment) or ""

    def _last_words(self) -> str:
        logs = [self._log, *sorted(Path(self._pipes).glob("*.log"))]
        lines = [line for file in logs if file.exists() for line in file.read_text().splitlines()]
        return lines[-1] if lines else "it wrote nothing"
