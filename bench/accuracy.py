"""How far results are from float64: the relative error in the Euclidean norm of out, dq, dk and dv.

usage: python -m bench.accuracy [--impl jax_flash2,dew_fa3,...] [--dims 64,128,256] [--json RESULTS.json]

Inputs are standard normal; an error is the mean over seeds. An implementation compiles once a configuration, out and
gradients in one program. What fails is listed and costs nothing but its own row.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

from bench import paths

paths.settle()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402

from bench import check, results_file  # noqa: E402
from bench.cases import Case  # noqa: E402
from bench.device import describe  # noqa: E402
from bench.rivals import Implementation, Inputs, JaxImplementation, find, first_line, make_inputs  # noqa: E402

NAMES = ("out", "dq", "dk", "dv")
OURS = "jax_flash2"


def answers(implementation: Implementation, case: Case) -> Callable[[Inputs], dict[str, jax.Array | np.ndarray]]:
    """A function of inputs to {"out", "dq", "dk", "dv"}, [b, t, heads, d] each."""
    if not isinstance(implementation, JaxImplementation):

        def call(inputs: Inputs) -> dict[str, np.ndarray]:
            loaded = implementation.load(case, inputs)
            return loaded.answer("fwd") | loaded.answer("bwd")

        return call
    attention = implementation.attention(case)

    @jax.jit
    def both(query, key, value, dout):
        out, pullback = jax.vjp(attention, query, key, value)
        return dict(zip(NAMES, (out, *pullback(dout)), strict=True))

    return lambda inputs: both(**inputs)


@functools.partial(jax.jit, static_argnames="d")
def _relative(got: jax.Array, exact: jax.Array, d: int) -> jax.Array:
    """got [b, t, heads, d], exact [b, heads, t, padded d]."""
    exact = jnp.swapaxes(exact, 1, 2)[..., :d]
    return jnp.linalg.norm(got.astype(jnp.float64) - exact) / jnp.linalg.norm(exact)


def errors(calls: dict[str, Callable], case: Case, seeds: int) -> dict[str, dict[str, float] | str]:
    """{implementation: {"out": error, ...}, or why there is none}."""
    found: dict[str, list] = {name: [] for name in calls}
    reasons: dict[str, str] = {}
    for seed in range(seeds):
        inputs = make_inputs(case, seed)
        exact = check.exact_heads(case, inputs)
        for name, call in calls.items():
            if name in reasons:
                continue
            try:
                got = call(inputs)
                with check.x64():
                    found[name].append([float(_relative(got[x], exact[x], case.d)) for x in NAMES])
            except Exception as error:
                reasons[name] = first_line(error)
    means = {name: np.mean(x, axis=0) for name, x in found.items() if name not in reasons}
    return reasons | {name: dict(zip(NAMES, map(float, x), strict=True)) for name, x in means.items()}


def table(rows: list[dict], against: str) -> str:
    """Errors in units of 1e-3, and ours over those of `against`."""
    lines = ["dtype     D    mask    implementation     out     dq     dk     dv   (1e-3)"]
    ratios: dict[str, list[float]] = {name: [] for name in NAMES}
    for row in rows:
        head = f"{row['dtype']:9s} {row['d']:<4d} {'causal' if row['causal'] else 'full':7s} {row['impl']:15s}"
        line = head + "".join(f"{row[name] * 1e3:7.3f}" for name in NAMES)
        beside = [x for x in rows if x["impl"] == against and all(x[k] == row[k] for k in ("dtype", "d", "causal"))]
        if row["impl"] == OURS and beside:
            for name in NAMES:
                ratios[name].append(row[name] / beside[0][name])
            line += f"   / {against}:" + "".join(f" {ratios[name][-1]:.3f}" for name in NAMES)
        lines.append(line)
    for name, each in ratios.items():
        if each:
            lines.append(f"{name}: {OURS} / {against}: mean {np.mean(each):.3f}, largest {max(each):.3f}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    jax.config.update("jax_logging_level", "WARNING")
    start, value = time.perf_counter(), flags.FLAGS
    implementations, missing = find(value.impl)
    left_out = [{"impl": name, "reason": reason} for name, reason in missing.items()]
    rows: list[dict] = []
    meta = {"command": " ".join(["python -m bench.accuracy", *sys.argv[1:]]), "seeds": value.seeds, **describe()}
    for dtype in value.dtypes:
        for d in map(int, value.dims):
            for causal in (False, True):
                case = Case(b=1, sq=value.length, h=value.heads, d=d, causal=causal, dtype=dtype)
                calls = {x.name: answers(x, case) for x in implementations if not x.refuses(case)}
                for name, found in errors(calls, case, value.seeds).items():
                    if isinstance(found, str):
                        left_out.append({"impl": name, "case": case.label, "reason": found})
                    else:
                        rows.append({"impl": name, **case.row(), **found})
                if value.json:
                    results_file.write(pathlib.Path(value.json), meta | {"left_out": left_out}, rows)
    print(table(rows, value.against))
    for x in left_out:
        print(f"left out {x['impl']} {x.get('case', '')}: {x['reason']}")
    print(f"took     {time.perf_counter() - start:.0f} s")
    return 0


def define_flags() -> None:
    flags.DEFINE_list("impl", [OURS, "dew_fa3", "torch_cudnn"], "which implementations")
    flags.DEFINE_string("against", "dew_fa3", "whose errors ours are divided by")
    flags.DEFINE_list("dtypes", ["bfloat16", "float16"], "of the inputs")
    flags.DEFINE_list("dims", ["64", "128", "256"], "head dims")
    flags.DEFINE_integer("length", 1024, "of queries and keys")
    flags.DEFINE_integer("heads", 4, "how many")
    flags.DEFINE_integer("seeds", 5, "how many inputs an error is the mean of")
    flags.DEFINE_string("json", None, "write the rows to this file, after every configuration")


if __name__ == "__main__":
    define_flags()
    app.run(main)
