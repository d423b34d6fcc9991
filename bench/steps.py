"""Milliseconds a training step: the example's GPT, with the attention of this package, of jax's cuDNN and of jax's XLA.

usage: python -m bench.steps [--lengths 1024,4096] [--attentions flash,cudnn,xla] [--json RESULTS.json]

The model, the optimizer and the training loop are those of examples/train_gpt.py, whose flags (--layers, --width,
--heads, --seed, --data) hold here too; on a GPU that is 12 layers of 12 heads of 64 in bfloat16. Every length trains
on as many tokens a step. All attentions start from one seed and see the same batches, so their losses must agree. They
take turns, in random order, a round of steps each; a step's time is the median over rounds.
"""

import dataclasses
import importlib.util
import pathlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import paths

paths.settle()

import jax  # noqa: E402
from absl import app, flags  # noqa: E402

from bench import results_file  # noqa: E402
from bench.device import describe  # noqa: E402
from bench.rivals import first_line  # noqa: E402
from bench.timing import Figure  # noqa: E402

EXAMPLE = paths.TREE / "examples" / "train_gpt.py"
ATTENTIONS = ("flash", "cudnn", "xla")
WARM = 3  # steps before the first round: compiling, and filling the device's queue


def example() -> Any:
    """examples/train_gpt.py as a module; brings its flags along."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def stepper(train_gpt: Any, config: Any, text: Any, seed: int) -> Callable[[int], float]:
    """A function that runs so many steps more, waits for the last one and gives its loss."""
    steps = train_gpt.Trainer(config, seed).steps(text, seed)

    def run(count: int) -> float:
        for _ in range(count):
            loss = next(steps)
        return float(loss)

    run(WARM)
    return run


def measure(run: Callable[[int], float], steps: int, rest: float) -> tuple[float, float]:
    """(seconds a step, the last loss) of one round."""
    time.sleep(rest)
    run(1)
    start = time.perf_counter()
    loss = run(steps)
    return (time.perf_counter() - start) / steps, loss


def compare(train_gpt: Any, config: Any, text: Any, names: Sequence[str], left_out: list[dict]) -> list[dict]:
    """One row for each attention at one length."""
    value, runs = flags.FLAGS, {}
    for name in names:
        try:
            runs[name] = stepper(train_gpt, dataclasses.replace(config, attention=name), text, value.seed)
        except Exception as error:
            left_out.append({"attention": name, "sequence": config.sequence, "reason": first_line(error)})
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, float] = {}
    order = random.Random(value.seed)
    for _ in range(value.rounds):
        for name in order.sample(list(runs), len(runs)):
            took, losses[name] = measure(runs[name], value.round_steps, value.rest)
            seconds[name].append(took)
    rows = []
    for name in runs:
        figure = Figure.of(seconds[name])
        tokens = config.batch * config.sequence / figure.seconds
        row = {"attention": name, "sequence": config.sequence, "batch": config.batch, "ms": figure.seconds * 1e3}
        rows.append(row | {"spread": figure.spread, "tokens_per_second": tokens, "loss": losses[name]})
    return rows


def line(row: dict, first: dict) -> str:
    return (
        f"T {row['sequence']:5d} batch {row['batch']:3d} {row['attention']:6s} {row['ms']:8.2f} ms a step "
        f"+-{row['spread'] / 2:.1%}  {row['tokens_per_second'] / 1e3:8.1f} k tokens/s  loss {row['loss']:.4f}  "
        f"{row['ms'] / first['ms']:.2f} x {first['attention']}"
    )


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    jax.config.update("jax_logging_level", "WARNING")
    start, value, train_gpt = time.perf_counter(), flags.FLAGS, sys.modules["train_gpt"]
    unknown = set(value.attentions) - set(ATTENTIONS)
    if unknown:
        raise app.UsageError(f"--attentions: {sorted(unknown)} are not among {', '.join(ATTENTIONS)}")
    base = train_gpt.Config.from_flags()
    steps = WARM + value.rounds * (1 + value.round_steps)
    text, _ = train_gpt.read_text(value.data)
    rows: list[dict] = []
    left_out: list[dict] = []
    config = {x: getattr(base, x) for x in ("layers", "width", "heads", "dtype")}
    meta = {"command": " ".join(["python -m bench.steps", *sys.argv[1:]]), **config, **describe()}
    print(f"{meta['device']}; {config}", flush=True)
    for length in map(int, value.lengths):
        sized = dataclasses.replace(base, sequence=length, batch=max(1, value.tokens // length), steps=steps)
        cell = compare(train_gpt, sized, text, value.attentions, left_out)
        for row in cell:
            print(line(row, cell[0]), flush=True)
        rows += cell
        if value.json:
            results_file.write(pathlib.Path(value.json), meta | {"left_out": left_out}, rows)
    for x in left_out:
        print(f"left out {x['attention']} at T {x['sequence']}: {x['reason']}")
    print(f"took     {time.perf_counter() - start:.0f} s")
    return 0


def define_flags() -> None:
    flags.DEFINE_list("attentions", list(ATTENTIONS), "which; times are also given as multiples of the first one's")
    flags.DEFINE_list("lengths", ["1024", "4096"], "sequence lengths")
    flags.DEFINE_integer("tokens", 16384, "tokens a step", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "rounds over the attentions", lower_bound=1)
    flags.DEFINE_integer("round_steps", 10, "steps a round", lower_bound=1)
    flags.DEFINE_float("rest", 0.2, "seconds of rest before a round", lower_bound=0)
    flags.DEFINE_string("json", None, "write the rows to this file, after every length")


if __name__ == "__main__":
    example()
    define_flags()
    app.run(main)
