"""The bench itself: for every case check every answer, then time every implementation in random order, and report.

Figures follow one protocol for all (timing.py). Whatever is not measured is listed with its reason: an absent rival, a
case it does not serve, a wrong answer, a spent budget.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from bench import cases, report
from bench.check import Check
from bench.device import describe
from bench.results_file import ResultsFile
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
_JSON = flags.DEFINE_string("json", None, 'write {"meta", "rows"} to this file, after every case and before every try')
_RESUME = flags.DEFINE_bool("resume", False, "go on with the run that --json holds, without what ended its process")
_PATIENCE = flags.DEFINE_float("patience", 150, "seconds that one try may take, where --json is given; 0: for ever")
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

    def __init__(
        self,
        implementations: Sequence[Implementation],
        modes: Sequence[str],
        protocol: Protocol,
        seed: int,
        file: ResultsFile | None = None,
        patience: float = 0,
    ):
        self.implementations, self.modes, self.protocol, self.seed = implementations, modes, protocol, seed
        self.file = file or ResultsFile(None, resume=False)
        self.rows, self.left_out = self.file.rows, self.file.left_out
        self.meta: dict[str, Any] = {}
        self.prepare_seconds = dict.fromkeys(["the check", *(x.name for x in implementations)], 0.0)
        self.matmul: Matmul | None = None
        self.matmul_rate = 0.0
        self._patience, self._random, self._start = patience, random.Random(seed), time.perf_counter()

    def leave_out(self, case: cases.Case, mode: str, name: str, reason: str) -> None:
        if not any((x["impl"], x["reason"]) == (name, reason) for x in self.left_out):
            logging.info("%s left out of %s %s: %s", name, mode, case.label, reason)
        self.left_out.append({"case": case.label, "mode": mode, "impl": name, "reason": reason})

    def write(self) -> None:
        seconds = {name: round(x, 1) for name, x in self.prepare_seconds.items()}
        elapsed = round(self.file.elapsed + time.perf_counter() - self._start, 1)
        self.file.write(self.meta | {"prepare_seconds": seconds, "elapsed": elapsed})

    @contextlib.contextmanager
    def trying(self, case: cases.Case, mode: str, name: str) -> Iterator[None]:
        """Around what may end the process or never end: the file says what it was, and a watchdog ends it."""
        if self._patience:
            self.file.trying(self.meta | {"elapsed": self.file.elapsed}, case.label, mode, name)
            faulthandler.dump_traceback_later(self._patience, exit=True)
        try:
            yield
        finally:
            if self._patience:
                faulthandler.cancel_dump_traceback_later()
        self.file.idle()

    def give_up_on(self, case: cases.Case, mode: str, name: str, error: Exception) -> None:
        """Whatever an implementation raises is a reason, not the end of the run, unless no other could run any more."""
        self.leave_out(case, mode, name, first_line(error))
        if on_gpu():
            try:
                jax.block_until_ready(jnp.zeros(8) + 1)
            except Exception:
                print(f"the device is lost in {name}, {mode} {case.label}: {first_line(error)}", flush=True)
                os._exit(1)  # another process has a device again; see supervise.py
        self.file.idle()

    def prepare(self, case: cases.Case) -> dict[str, dict[str, Timer]]:
        """{mode: {implementation: timer}} of the answers that are right."""
        timers: dict[str, dict[str, Timer]] = {mode: {} for mode in self.modes}
        began = time.perf_counter()
        inputs = make_inputs(case, self.seed)
        check = Check(case, inputs, self.seed)
        self.prepare_seconds["the check"] += time.perf_counter() - began
        for implementation in self.implementations:
            name, refusal, loaded = implementation.name, implementation.refuses(case), None
            began = time.perf_counter()
            for mode in self.modes:
                fault = refusal
                if fault is None and self.file.is_fatal(case.label, mode, name):
                    fault = "ended the process, here or in other cases"
                try:
                    if fault is None:
                        with self.trying(case, mode, name):
                            loaded = loaded or implementation.load(case, inputs)
                            fault = check.fault(loaded.answer(mode))
                            timers[mode][name] = loaded.timer(mode)
                    if fault is not None:
                        timers[mode].pop(name, None)
                        self.leave_out(case, mode, name, fault)
                except Exception as error:
                    timers[mode].pop(name, None)
                    self.give_up_on(case, mode, name, error)
            self.prepare_seconds[name] += time.perf_counter() - began
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
                with self.trying(case, mode, name):
                    guesses[name] = timed[name].guess()
            except Exception as error:
                self.give_up_on(case, mode, name, error)
        rounds = budget.rounds(self.protocol.rounds, sum(map(self.protocol.cost, guesses.values())) or 1)
        if not rounds:
            for name in timers:
                self.leave_out(case, mode, name, "the time budget is spent")
            return
        seconds: dict[str, list[float]] = {name: [] for name in guesses}
        for _ in range(rounds):
            for name in self._random.sample(list(seconds), len(seconds)):
                try:
                    with self.trying(case, mode, name):
                        seconds[name].append(timed[name].measure(self.protocol, guesses[name]))
                except Exception as error:
                    del seconds[name]
                    self.give_up_on(case, mode, name, error)
        beside = seconds.pop("matmul", None)
        matmul = self.matmul.flops / Figure.of(beside).seconds if beside else self.matmul_rate
        cell = []
        for name, each in seconds.items():
            figure, rate = Figure.of(each), case.flops(mode) / Figure.of(each).seconds
            cell.append(
                {"impl": name, "mode": mode, "case": case.label, **case.row(), "us": figure.seconds * 1e6}
                | {"tflops": rate / 1e12, "spread": figure.spread, "rounds": rounds, "of_matmul": rate / matmul}
            )
        if cell:
            self.rows += report.with_ratios(cell)
            print(report.line(case, mode, cell), flush=True)

    def case(self, case: cases.Case, budget: Budget) -> None:
        """Prepares and measures one case, in all passes."""
        began = time.perf_counter()
        try:
            timers = self.prepare(case)
        except Exception as error:  # no inputs or no reference: too little memory
            self.give_up_on(case, self.modes[0], "all", error)
            timers = dict.fromkeys(self.modes)
        budget.overhead(time.perf_counter() - began, len(self.modes))
        for mode in self.modes:
            if timers[mode]:
                self.measure(case, mode, timers[mode], budget)
            else:
                budget.drop(1)
        self.file.done.append(case.label)
        self.write()


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
    file = ResultsFile(_JSON.value, _RESUME.value)
    run = Run(implementations, modes, protocol, _SEED.value, file, _PATIENCE.value if _JSON.value else 0)
    if file.done:
        print(f"resume   {len(file.done)} of {len(todo)} cases are done")
        todo = [case for case in todo if case.label not in file.done]

    matmul = run.time_matmul()
    print(f"matmul   {run.matmul.what}: {run.matmul_rate / 1e12:.4g} TFLOP/s, spread {matmul.spread:.1%}")
    print(f"measure  {', '.join(x.name for x in implementations)}: {len(todo)} cases x {', '.join(modes)}")
    least = len(todo) * len(modes) * len(implementations) * protocol.rounds * protocol.cost(1e-3)
    print(f"expect   {least:.0f} s of rests and batches, and compiling", flush=True)

    command = [x for x in sys.argv[1:] if x != "--resume"]
    run.meta = {"command": " ".join(["python -m bench", *command]), "suite": suite, "missing": missing}
    run.meta["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    run.meta["matmul"] = {"what": run.matmul.what, "tflops": run.matmul_rate / 1e12, "spread": matmul.spread}
    run.meta |= {"protocol": dataclasses.asdict(protocol), **describe()}
    spent = file.elapsed + time.perf_counter() - start
    seconds = max(1.0, _TIME_BUDGET.value - spent) if _TIME_BUDGET.value else 0.0
    budget = Budget(seconds, len(todo) * len(modes))
    for case in todo:
        if budget.left() > 0:
            run.case(case, budget)
            continue
        for mode in modes:
            run.leave_out(case, mode, "all", "the time budget is spent")
    run.write()
    print(report.summary(run.rows))
    print(report.bars(run.rows, run.meta))
    print(report.left_out(run.left_out))
    if _PLOT.value:
        from bench import plot

        plot.draw(run.rows, run.meta, _PLOT.value)
    print("prepared " + ", ".join(f"{name} {x:.0f} s" for name, x in run.prepare_seconds.items()))
    print(f"took     {time.perf_counter() - start:.0f} s")
    wrong = [x for x in run.left_out if x["impl"] == "jax_flash2" and x["reason"].startswith("wrong")]
    return 1 if wrong else 0


def start() -> None:
    app.run(main)
