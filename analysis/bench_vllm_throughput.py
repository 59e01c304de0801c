"""Sampled tokens a second of 1 to E engines on one GPU, beside one plain `LLM.generate` alone on it.

    python analysis/bench_vllm_throughput.py --out DIR            (PYTHONPATH=. and wherever vllm is)

Equal work everywhere: N completions in all, 8 of each prompt of 64 random tokens, 256 tokens each with
the log-prob of every one, temperature 1, random weights and no end token. For each shape:

| kind  | what                                                                                        |
|-------|---------------------------------------------------------------------------------------------|
| plain | one process, alone on the GPU, ended before the others start: `LLM.generate(logprobs=0)`     |
|       | without seeds, as one uses it, and at the largest N with a seed of each completion as well   |
| ours  | E engines, each a process with `VllmEngine` and its part of the memory (generator/memory.py) |

E engines are started once, and 1, 2, ... E of them measured while the others idle: an idle one launches
nothing, so it takes neither a core nor the GPU, and its memory was given to it alone; what it has
beside it is smaller caches, which hold all N here at once. As in a run they are clients of a
Multi-Process Service (asyncrl/mps.py; --mps off: they take turns on the GPU); the plain one is not.
All engines of a case begin at the same moment with N / n completions each; the case's time ends with
the last one. A case is repeated unless it took REPEAT_UNDER_S.

ratio_best = our best at the largest N of 1.4b / the best plain rate over all N. Other variants
(engine_process.py: fp8, scheduling, prefill, graphs) start E more engines each. DIR/vllm_throughput.json
is written after every case, with provenance; the last thing printed is a table.
"""

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from analysis.engine_process import VARIANTS, CaseFailedError, EngineProcess, Job, Row
from analysis.random_models import SHAPES, make_model
from asyncrl.mps import MpsDaemon
from asyncrl.placement import visible_gpus
from asyncrl.telemetry.provenance import provenance

REPEAT_UNDER_S = 6.0
WARM_UP_TOKENS = 8


def main() -> None:
    """Every shape: plain, then ours in every variant; then the table."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    for shape in options.shapes:
        make_model(options.out / "models" / shape, shape)
        if not options.no_plain:
            bench.measure(shape, "plain", "base", [1])
        for variant in options.variants:
            bench.measure(shape, "ours", variant, options.engines)
    print(table(bench.rows))
    print(f"ratio_best {ratio_best(bench.rows)}, {time.monotonic() - bench.began_s:.0f} s")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.4b", "135m"])
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=["base"])
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--num", nargs="+", type=int, default=[64, 512, 1024])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--mps", choices=["on", "off"], default="on")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.85, help="of the GPU, all engines")
    parser.add_argument("--stagger-s", type=float, default=15.0, help="at most between two starts")
    parser.add_argument("--start-s", type=float, default=150.0, help="limit of all starts")
    parser.add_argument("--limit-s", type=float, default=40.0, help="of one case")
    parser.add_argument("--total-s", type=float, default=470.0, help="no case begins later")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


class Bench:
    """Rows so far, and the file that holds them."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Nothing is measured yet."""
        self.began_s = time.monotonic()
        self.rows: list[Row] = []
        self._options = options
        self._failures: list[Row] = []
        self._starts: list[Row] = []
        self._environment: dict[str, str] = {}
        given = {key: str(value) for key, value in vars(options).items()}
        self._head = provenance() | {"options": given}

    def measure(self, shape: str, kind: str, variant: str, counts: list[int]) -> None:
        """Start as many engines as the largest of `counts` needs; every case of them."""
        options = self._options
        what = {"shape": shape, "kind": kind, "variant": variant}
        job = Job(
            kind=kind, model=str(options.out / "models" / shape), variant=variant,
            engines=max(counts), max_num=max(options.num),
            batches=[part for n in counts for num in options.num for part in split(num, n)],
            prompt_tokens=options.prompt_tokens, tokens=options.tokens, memory=options.memory,
            eager=options.eager,
        )  # fmt: skip
        with ExitStack() as stack:
            self._environment = self._share_gpu(stack) if kind == "ours" else {}
            try:
                engines = self._start_somehow(stack, job, what)
                for num in sorted(options.num, reverse=True):
                    for count in counts:
                        if time.monotonic() > self.began_s + options.total_s:
                            raise CaseFailedError(f"not begun: {options.total_s:g} s are over")
                        self._case(what, engines[:count], num)
            except CaseFailedError as error:
                self._failures.append(what | {"failed": str(error)})
                print(self._failures[-1], flush=True)
        self._write()

    def _share_gpu(self, stack: ExitStack) -> dict[str, str]:
        """Variables of engines that share the first visible GPU."""
        if self._options.mps == "off" or not (gpus := visible_gpus()):
            return {}
        daemon = MpsDaemon(gpus[:1], self._options.out)
        stack.callback(daemon.close)
        daemon.start()
        return daemon.client_environment

    def _start_somehow(self, stack: ExitStack, job: Job, what: Row) -> list[EngineProcess]:
        """Once more if the first try fails: 0.26 does now and then, capturing graphs."""
        first = ExitStack()
        try:
            engines = self._start(first, job, what)
        except CaseFailedError as error:
            first.close()
            self._failures.append(what | {"tried again": str(error)})
            return self._start(stack, job, what)
        stack.push(first.pop_all())
        return engines

    def _start(self, stack: ExitStack, job: Job, what: Row) -> list[EngineProcess]:
        """One after another, each when the one before is ready or has had --stagger-s."""
        began_s = time.monotonic()
        name = "-".join(str(part) for part in what.values())
        engines: list[EngineProcess] = []
        for index in range(job.engines):
            if engines:
                engines[-1].has_answer(self._options.stagger_s)
            engine = EngineProcess(
                job, self._options.out / f"{name}-{index}.log", self._environment
            )
            stack.callback(engine.close)
            engines.append(engine)
        each = [engine.answer(began_s + self._options.start_s)["start_s"] for engine in engines]
        self._starts.append(what | {"all_s": time.monotonic() - began_s, "each_s": each})
        print(self._starts[-1], flush=True)
        return engines

    def _case(self, what: Row, engines: list[EngineProcess], num: int) -> None:
        """Warm up, repeat, keep the row."""
        options = self._options
        is_plain = what["kind"] == "plain"
        seedings = [False] if is_plain else [True]
        if is_plain and num == max(options.num):
            seedings.append(True)
        for seeded in seedings:
            more = {"seeded": seeded} if is_plain else {}
            together(engines, num, WARM_UP_TOKENS, options.limit_s, more)
            runs: list[Row] = []
            while len(runs) < options.repeats and (not runs or runs[-1]["s"] < REPEAT_UNDER_S):
                runs.append(together(engines, num, options.tokens, options.limit_s, more))
            rates = [num * options.tokens / run["s"] for run in runs]
            row = what | {"engines": len(engines), "num": num, "seeded": seeded}
            row |= {"mps": bool(self._environment)}
            row |= {"tokens_per_s": round(max(rates)), "rates": rates, "runs": runs}
            self.rows.append(row)
            print({key: row[key] for key in row if key != "runs"}, flush=True)
            self._write()

    def _write(self) -> None:
        whole = self._head | {
            "seconds": time.monotonic() - self.began_s, "ratio_best": ratio_best(self.rows),
            "starts": self._starts, "failures": self._failures, "rows": self.rows,
        }  # fmt: skip
        text = json.dumps(whole, indent=1) + "\n"
        draft = self._options.out / "vllm_throughput.json.draft"
        draft.write_text(text)
        draft.replace(self._options.out / "vllm_throughput.json")


def split(num: int, engines: int) -> list[int]:
    """Completions of each engine."""
    return [num // engines + (i < num % engines) for i in range(engines)]


def together(engines: list[EngineProcess], num: int, tokens: int, limit_s: float, more: Row) -> Row:
    """One run of N completions, begun by all at once: its seconds, each engine's, and processor time."""
    at_s = time.monotonic() + 0.1
    for engine, part in zip(engines, split(num, len(engines)), strict=True):
        engine.ask(num=part, tokens=tokens, at=at_s, **more)
    answers = [engine.answer(at_s + limit_s) for engine in engines]
    return {
        "s": max(answer["ended_s"] for answer in answers) - at_s,
        "each_s": [answer["ended_s"] - at_s for answer in answers],
        "late_s": max(answer["began_s"] for answer in answers) - at_s,
        "cpu_s": [answer["cpu_s"] for answer in answers],
    }


def ratio_best(rows: list[Row], shape: str = "1.4b") -> float | None:
    """Our best at the largest N over the best plain rate at any; None while one is missing."""
    plain = [r["tokens_per_s"] for r in rows if (r["shape"], r["kind"]) == (shape, "plain")]
    mine = [r for r in rows if (r["shape"], r["kind"], r["variant"]) == (shape, "ours", "base")]
    largest = max((r["num"] for r in mine), default=0)
    ours = [r["tokens_per_s"] for r in mine if r["num"] == largest]
    return round(max(ours) / max(plain), 3) if ours and plain else None


def table(rows: list[Row]) -> str:
    """Tokens a second: a line for each shape, variant and number of engines, a column for each N."""
    nums = sorted({row["num"] for row in rows})
    lines = [f"{'shape':6} {'variant':11} {'engines':8}" + "".join(f"{n:>9}" for n in nums)]
    cells: dict[tuple[Any, ...], dict[int, int]] = {}
    for row in rows:
        count = "plain" if row["kind"] == "plain" else row["engines"]
        name = "seeded" if row["kind"] == "plain" and row["seeded"] else row["variant"]
        cells.setdefault((row["shape"], name, count), {})[row["num"]] = row["tokens_per_s"]
    for (shape, name, count), found in cells.items():
        values = "".join(f"{found.get(n, ''):>9}" for n in nums)
        lines.append(f"{shape:6} {name:11} {count!s:8}{values}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
