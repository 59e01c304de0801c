"""The `asyncrl` command.

    asyncrl run CONFIG [section.key=value ...]      everything on this host, supervised
    asyncrl config CONFIG [section.key=value ...]   the resolved configuration, commented
    asyncrl probe CONFIG [section.key=value ...]    how many vLLM engines a GPU of this host should have
    asyncrl broker|learner|generator CONFIG ...     one process, for runs over several hosts
    asyncrl sweep SWEEP [key=value ...]             many runs that differ in k, and a verdict
    asyncrl metrics                                 every metric: name, unit, reduction, meaning
    asyncrl trace RUN [--out FILE]                  all processes of a run as one Perfetto timeline
    asyncrl report RUN [--out FILE]                 one HTML page: curves, time, drops, rollouts
    asyncrl watch RUN [--once]                      the same in the terminal, while the run goes on
    asyncrl dashboard --entity NAME                 a saved W&B workspace with the sections of the metrics

A process is imported only when asked for; guard.py is the outermost frame of each. Exit codes: 0 done,
1 failed, 2 usage or config.
"""

import argparse
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.arguments import parse
from asyncrl.config import RunConfig, read_config, to_toml
from asyncrl.errors import ConfigError
from asyncrl.guard import guard, leave, uncollected
from asyncrl.run_folder import check_model, read_key, run_folder
from asyncrl.sweep.settings import SweepSettings, read_sweep
from asyncrl.telemetry.terminal import printable, say, say_and_keep


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, do it, exit."""
    options = parse(_parser(), arguments)
    try:
        if "config" not in options:
            sys.exit(options.do(options))
        sys.exit(options.do(options.read(Path(options.config), options.overrides), options))
    except (ConfigError, OSError) as error:
        sys.stderr.write(printable(f"asyncrl: {error}\n"))
        sys.exit(2 if isinstance(error, ConfigError) else 1)


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
        sub.set_defaults(do=do, read=read_config)
        return sub

    command("run", "start and supervise a whole run on this host", _run)
    command("config", "print the resolved configuration", _config)
    probe = command("probe", "measure how many vLLM engines a GPU should have (a minute)", _probe)
    probe.add_argument("--run-dir", type=Path, help="write probe.json there")
    probe.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
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
    _add_sweep(commands.add_parser("sweep", help="many runs that differ in k, and a verdict"))
    commands.add_parser("metrics", help="list every metric").set_defaults(do=_metrics)
    trace = commands.add_parser("trace", help="all processes of a run as one Perfetto timeline")
    trace.add_argument("run", type=Path, help="run folder")
    trace.add_argument("--out", type=Path, help="by default RUN/timeline.json; .gz is compressed")
    trace.set_defaults(do=_trace)
    _add_views(commands)
    return parser


def _add_views(commands: Any) -> None:  # noqa: ANN401  (argparse does not export the type)
    """Commands that show a run."""
    report = commands.add_parser("report", help="one HTML page: curves, time, drops, rollouts")
    report.add_argument("run", type=Path, help="run folder")
    report.add_argument("--out", type=Path, help="by default RUN/report.html")
    report.add_argument(
        "--max-mb", type=int, default=40, help="of rollouts; of more, groups are left out evenly"
    )
    report.set_defaults(do=_report)
    watch = commands.add_parser("watch", help="follow a run in the terminal until it ends")
    watch.add_argument("run", type=Path, help="run folder")
    watch.add_argument("--once", action="store_true", help="print one frame and end")
    watch.set_defaults(do=_watch)
    dashboard = commands.add_parser("dashboard", help="save a W&B workspace for asyncrl's metrics")
    dashboard.add_argument("--entity", required=True, help="W&B user or team")
    dashboard.add_argument("--project", default="asyncrl", help="telemetry.wandb_project")
    dashboard.set_defaults(do=_dashboard)


def _add_sweep(sub: argparse.ArgumentParser) -> None:
    """Its file is of another kind (sweep/settings.py)."""
    sub.add_argument("config", metavar="sweep", help="TOML file")
    sub.add_argument("overrides", nargs="*", help="key=value of that file, as num_parallel=8")
    sub.add_argument("--shard", default="0/1", metavar="I/N", help="only part I of N, 0 <= I < N")
    sub.add_argument("--report", action="store_true", help="start nothing; result of what is there")
    sub.set_defaults(do=_sweep, read=read_sweep)


def _sweep(settings: SweepSettings, options: argparse.Namespace) -> int:
    from asyncrl.sweep.command import sweep

    index, slash, count = options.shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise ConfigError(f"--shard {options.shard}: expected I/N, as 0/4")
    return sweep(settings, part=(int(index), int(count)), report_only=options.report)


def _metrics(_options: argparse.Namespace) -> int:
    from asyncrl.telemetry.listing import metrics_table

    sys.stdout.write(metrics_table())
    return 0


def _trace(options: argparse.Namespace) -> int:
    from asyncrl.telemetry.timeline import write_timeline

    out = options.out or options.run / "timeline.json"
    num_events = write_timeline(options.run, out)
    sys.stdout.write(f"{out}: {num_events} events; open it in https://ui.perfetto.dev\n")
    return 0


def _report(options: argparse.Namespace) -> int:
    from asyncrl.report.page import write_report

    out = options.out or options.run / "report.html"
    data = write_report(options.run, out, budget_bytes=options.max_mb * 2**20)
    num_steps, rollouts = len(data["steps"].get("step", ())), data["rollouts"]
    shown = f"{len(rollouts['rows'])} of {rollouts['num_found']} rollouts"
    sys.stdout.write(f"{out}: {num_steps} steps, {shown}; open it in a browser\n")
    return 0


def _watch(options: argparse.Namespace) -> int:
    from asyncrl.report.watch import watch

    return watch(options.run, once=options.once)


def _dashboard(options: argparse.Namespace) -> int:
    from asyncrl.report.dashboard import save_workspace

    url = save_workspace(entity=options.entity, project=options.project)
    sys.stdout.write(f"{url}\n")
    return 0


def _config(config: RunConfig, _options: argparse.Namespace) -> int:
    sys.stdout.write(to_toml(config))
    return 0


def _probe(config: RunConfig, options: argparse.Namespace) -> int:
    def measure() -> None:
        from asyncrl.generator import probe
        from asyncrl.placement import cores_of_a_place

        num_cores = len(os.sched_getaffinity(0))
        if not (options.supervised and config.host.pin_cores):  # else they are the place's own
            num_cores = cores_of_a_place(config, num_cores)
        record = options.run_dir / "probe.json" if options.run_dir else None
        probe.run(config, num_cores=num_cores, record=record, say=say)

    if options.supervised:
        return _as("probe", options, measure)
    check_model(config)
    measure()
    return 0


def _run(config: RunConfig, _options: argparse.Namespace) -> int:
    from asyncrl.preflight import check_settings

    num_rows = check_settings(config)
    with run_folder(config) as run_dir:
        return _run_in(run_dir, config, num_rows)


def _run_in(run_dir: Path, config: RunConfig, num_rows: dict[str, int]) -> int:
    """The whole run, with its records in a folder that is ours alone."""
    from asyncrl import attempt
    from asyncrl.preflight import describe_rows
    from asyncrl.run_folder import add_facts, resume_hint
    from asyncrl.supervise import Supervisor

    run_id = attempt.begin(run_dir, config)
    tell = say_and_keep(run_dir / "logs/supervisor.log")
    supervisor = Supervisor(config, run_dir, run_id, say=tell)
    tell(f"run {config.name}: records in {run_dir}")
    if num_rows:
        add_facts(run_dir, num_rows=num_rows)
        for line in describe_rows(num_rows, config):
            tell(line)
    started_s = time.monotonic()
    code = supervisor.run()
    outcome: attempt.Outcome = "done" if code == 0 else "interrupted" if code == 130 else "failed"
    found = attempt.end(run_dir, outcome, started_s=started_s, failure=supervisor.failure)
    for key, value in found.items():
        if key != "shares":
            tell(f"  {key}: {value}")
    tell(f"run {config.name} {outcome}: {run_dir}")
    if code == 130:
        tell(resume_hint(run_dir))
    return code


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
            trace=options.run_dir / "trace/broker.jsonl" if config.telemetry.trace else None,
            drops=options.run_dir / "drops.jsonl",
        )

    return _as("broker", options, serve)


def _learner(config: RunConfig, options: argparse.Namespace) -> int:
    def train() -> None:
        with uncollected():
            from asyncrl.learner import assemble

        assemble.run(
            config,
            endpoint=options.broker,
            run_id=options.run_id,
            token=_token(config, options),
            run_dir=options.run_dir,
        )

    guarded = partial(_as, "learner", options, train)
    if options.supervised or os.environ.get("RANK", "0") != "0":
        code = guarded()
    else:
        from asyncrl.attempt import keep_by_hand

        code = keep_by_hand(options.run_dir, config, run_id=options.run_id, train=guarded)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        leave(code)  # a thread of gloo that outlives its group makes that an abort
    return code


def _generator(config: RunConfig, options: argparse.Namespace) -> int:
    def generate() -> None:
        with uncollected():
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

    code = _as(options.name, options, generate)
    if code:
        leave(code)  # vLLM may wait there for a worker that has died
    return code


def _as(name: str, options: argparse.Namespace, body: Callable[[], None]) -> int:
    return guard(name, body, run_dir=options.run_dir, supervised=options.supervised)


def _token(config: RunConfig, options: argparse.Namespace) -> str:
    if options.token_file is not None:
        return read_key(options.token_file)
    return read_key(Path(config.broker.token_path)) if config.broker.token_path else ""
