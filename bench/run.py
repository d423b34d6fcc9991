"""The bench itself: for every case check every answer, then time every implementation in random order, and report.

Figures follow one protocol for all (timing.py). Whatever is not measured is listed with its reason: an absent rival, a
case it does not serve, a wrong answer, a spent budget.
"""

import dataclasses
import datetime
import importlib
import json
import pathlib
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from bench import cases, report
from bench.check import Check
from bench.rivals import Implementation, find, first_line, make_inputs, on_gpu
from bench.timing import Budget, Figure, Protocol, Timer

_SUITE = flags.DEFINE_enum("suite", None, list(cases.SUITES), "which cases; default: grid on a GPU, cpu on a CPU")
_PASS = flags.DEFINE_list("pass", ["fwd", "bwd"], f"which of {', '.join(cases.PASSES)} to time")
_IMPL = flags.DEFINE_list("impl", [], "which implementations; default: every one that is found")
_ONLY = flags.DEFINE_list("only", [], "keep the cases whose label has all these words, such as d128,causal")
_DTYPE = flags.DEFINE_string("dtype", None, "of the cases that name none; default: bfloat16 on a GPU, float32 on a CPU")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "rounds over the implementations, each in random order", lower_bound=1)
_BATCHES = flags.DEFINE_integer("batches", 5, "batches a round", lower_bound=1)
_BATCH_MS = flags.DEFINE_float("batch_ms", 50.0, "length of a batch of back-to-back calls", lower_bound=0)
_REST = flags.DEFINE_float("rest", 0.2, "seconds of rest before a measurement", lower_bound=0)
_TIME_BUDGET = flags.DEFINE_float("time_budget", 0, "seconds for the whole run, by fewer rounds; 0: no limit")
_SEED = flags.DEFINE_integer("seed", 0, "of inputs and orders")
_JSON = flags.DEFINE_string("json", None, 'write {"meta", "rows"} to this file, after every case')
_PLOT = flags.DEFINE_string("plot", None, "write a PNG to this file")


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The matrix product whose rate in this run figures are shares of."""

    what: str
    flops: float
    timer: Timer

    @classmethod
    def make(cls) -> "Matmul":
        n, dtype = (8192, jnp.bfloat16) if on_gpu() else (2048, jnp.float32)
        keys = jax.random.split(jax.random.key(7))
        a, b = (jax.random.normal(key, (n, n), jnp.float32).astype(dtype) for key in keys)
        product = jax.jit(lambda a, b: a @ b)
        timer = Timer(lambda: product(a, b), jax.block_until_ready, on_gpu())
        timer.run(1)  # compiles
        return cls(f"{jnp.dtype(dtype).name} {n}^3", 2.0 * n**3, timer)


class Run:
    """One run's state: what was found, measured and left out."""

    def __init__(self, implementations: Sequence[Implementation], modes: Sequence[str], protocol: Protocol, seed: int):
        self.implementations, self.modes, self.protocol, self.seed = implementations, modes, protocol, seed
        self.rows: list[dict] = []
        self.left_out: list[dict] = []
        self.matmul: Matmul | None = None
        self.matmul_rate = 0.0
        self._random = random.Random(seed)

    def leave_out(self, case: cases.Case, mode: str, name: str, reason: str) -> None:
        if not any((x["impl"], x["reason"]) == (name, reason) for x in self.left_out):
            logging.info("%s left out of %s %s: %s", name, mode, case.label, reason)
        self.left_out.append({"case": case.label, "mode": mode, "impl": name, "reason": reason})

    def prepare(self, case: cases.Case) -> dict[str, dict[str, Timer]]:
        """{mode: {implementation: timer}} of the answers that are right."""
        inputs = make_inputs(case, self.seed)
        check = Check(case, inputs, self.seed)
        timers: dict[str, dict[str, Timer]] = {mode: {} for mode in self.modes}
        for implementation in self.implementations:
            refusal, loaded = implementation.refuses(case), None
            for mode in self.modes:
                fault = refusal
                try:
                    if fault is None:
                        loaded = loaded or implementation.load(case, inputs)
                        fault = check.fault(loaded.answer(mode))
                        timers[mode][implementation.name] = loaded.timer(mode)
                except Exception as error:  # whatever a rival raises is a reason, not the end of the run
                    fault = first_line(error)
                if fault is not None:
                    timers[mode].pop(implementation.name, None)
                    self.leave_out(case, mode, implementation.name, fault)
        return timers

    def time_matmul(self) -> Figure:
        self.matmul = Matmul.make()
        guess = self.matmul.timer.guess()
        figure = Figure.of([self.matmul.timer.measure(self.protocol, guess) for _ in range(self.protocol.rounds)])
        self.matmul_rate = self.matmul.flops / figure.seconds
        return figure

    def measure(self, case: cases.Case, mode: str, timers: dict[str, Timer], budget: Budget) -> None:
        # A CPU's rate moves with what else it runs, so there the product is timed beside every cell.
        timed = timers if on_gpu() else timers | {"matmul": self.matmul.timer}
        guesses: dict[str, float] = {}
        for name in list(timed):
            try:
                guesses[name] = timed[name].guess()
            except Exception as error:
                self.leave_out(case, mode, name, first_line(error))
        rounds = budget.rounds(self.protocol.rounds, sum(map(self.protocol.cost, guesses.values())) or 1)
        if not rounds:
            for name in timers:
                self.leave_out(case, mode, name, "the time budget is spent")
            return
        seconds: dict[str, list[float]] = {name: [] for name in guesses}
        for _ in range(rounds):
            for name in self._random.sample(list(guesses), len(guesses)):
                seconds[name].append(timed[name].measure(self.protocol, guesses[name]))
        beside = seconds.pop("matmul", None)
        matmul = self.matmul.flops / Figure.of(beside).seconds if beside else self.matmul_rate
        cell = []
        for name, each in seconds.items():
            figure, rate = Figure.of(each), case.flops(mode) / Figure.of(each).seconds
            cell.append(
                {"impl": name, "mode": mode, **case.row(), "us": figure.seconds * 1e6, "tflops": rate / 1e12}
                | {"spread": figure.spread, "rounds": rounds, "of_matmul": rate / matmul}
            )
        self.rows += report.with_ratios(cell)
        print(report.line(case, mode, cell), flush=True)


def describe() -> dict:
    """What the figures were taken on."""
    found = {"device": jax.devices()[0].device_kind, "host": platform.machine(), "python": platform.python_version()}
    if on_gpu():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    else:
        info = pathlib.Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
        found["device"] = f"{names[0]}, {len(names)} threads" if names else platform.processor()
    for name in ("jax", "jaxlib", "torch", "tokamax", "dew_flash_attn", "fa4_jax", "jax_flash2"):
        if name in sys.modules:
            found[name] = getattr(sys.modules[name], "__version__", "?")
    native = f"jax_flash2.{'_cuda' if on_gpu() else '_cpu'}"
    try:
        found["source_digest"] = importlib.import_module(native).source_digest()
    except ImportError as error:
        found["source_digest"] = first_line(error)
    return found


def chosen_cases(suite: str, dtype: str, only: Sequence[str]) -> list[cases.Case]:
    named = [case if case.dtype else dataclasses.replace(case, dtype=dtype) for case in cases.SUITES[suite]()]
    return [case for case in named if set(only) <= set(case.label.split())]


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    modes = flags.FLAGS["pass"].value
    if set(modes) - set(cases.PASSES):
        raise app.UsageError(f"--pass={','.join(modes)}: known are {', '.join(cases.PASSES)}")
    jax.config.update("jax_logging_level", "WARNING")  # absl's default would show which platforms jax looked for
    start = time.perf_counter()
    suite = _SUITE.value or ("grid" if on_gpu() else "cpu")
    todo = chosen_cases(suite, _DTYPE.value or ("bfloat16" if on_gpu() else "float32"), _ONLY.value)
    if not todo:
        raise app.UsageError(f"--only={','.join(_ONLY.value)}: no case of suite {suite} has all these words")
    protocol = Protocol(_ROUNDS.value, _BATCHES.value, _BATCH_MS.value / 1e3, _REST.value)
    implementations, missing = find(_IMPL.value)
    for name, reason in missing.items():
        print(f"missing  {name:12s} {reason}")
    run = Run(implementations, modes, protocol, _SEED.value)

    matmul = run.time_matmul()
    print(f"matmul   {run.matmul.what}: {run.matmul_rate / 1e12:.4g} TFLOP/s, spread {matmul.spread:.1%}")
    print(f"measure  {', '.join(x.name for x in implementations)}: {len(todo)} cases x {', '.join(modes)}")
    least = len(todo) * len(modes) * len(implementations) * protocol.rounds * protocol.cost(1e-3)
    print(f"expect   {least:.0f} s of rests and batches, and compiling", flush=True)

    meta = {"command": " ".join(["python -m bench", *sys.argv[1:]]), "suite": suite, "missing": missing}
    meta["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    meta["matmul"] = {"what": run.matmul.what, "tflops": run.matmul_rate / 1e12, "spread": matmul.spread}
    meta["protocol"] = dataclasses.asdict(protocol)
    seconds = max(1.0, _TIME_BUDGET.value - (time.perf_counter() - start)) if _TIME_BUDGET.value else 0.0
    budget = Budget(seconds, len(todo) * len(modes))
    for case in todo:
        if budget.left() <= 0:
            for mode in modes:
                run.leave_out(case, mode, "all", "the time budget is spent")
            continue
        began = time.perf_counter()
        timers = run.prepare(case)
        budget.overhead(time.perf_counter() - began, len(modes))
        for mode in modes:
            if timers[mode]:
                run.measure(case, mode, timers[mode], budget)
            else:
                budget.drop(1)
        del timers
        if _JSON.value:
            write(_JSON.value, {"meta": meta | describe() | {"left_out": run.left_out}, "rows": run.rows})
    print(report.summary(run.rows))
    print(report.left_out(run.left_out))
    if _PLOT.value:
        from bench import plot

        plot.draw(run.rows, meta, _PLOT.value)
    print(f"took     {time.perf_counter() - start:.0f} s")
    wrong = [x for x in run.left_out if x["impl"] == "jax_flash2" and x["reason"].startswith("wrong")]
    return 1 if wrong else 0


def write(path: str, results: dict) -> None:
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(row) for row in results["rows"])
    target.write_text(f'{{"meta": {json.dumps(results["meta"], indent=1)},\n"rows": [\n{rows}\n]}}\n')


def start() -> None:
    app.run(main)
