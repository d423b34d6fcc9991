"""Scores that grow, shrink and jump from one tile of keys to the next, beyond what a float32 holds, under every mask;
and float16 near its limits.

A kernel that walks keys in tiles keeps each row's powers relative to something: its largest score so far, or that of
the first tile it reads. Everything here moves what a row sees far away from that after its first tile, in either
direction of walking, with rows whose first tile is cut by the mask or empty. Keys span many tiles of every backend.
"""

import dataclasses
from collections.abc import Callable

import cases
import evaluate
import numpy as np
import pytest
from cases import BOTTOM_RIGHT, CAUSAL, TOP_LEFT, Case

FAR = 64.0  # as a factor of keys: scores then span hundreds of nats, and a float32 holds e^88
Factors = Callable[[np.ndarray], np.ndarray]  # of the keys, by their positions as a share of the length

GROWTHS: dict[str, Factors] = {
    "rising": lambda at: 1 + 15 * at,
    "falling": lambda at: 16 - 15 * at,
    "rising-far": lambda at: 1 + (FAR - 1) * at,
    "falling-far": lambda at: FAR - (FAR - 1) * at,
    "jump": lambda at: np.where((at > 0.45) & (at < 0.52), FAR, 0.5),
    "jump-at-first": lambda at: np.where(at < 0.06, FAR, 0.5),
    "jump-at-last": lambda at: np.where(at > 0.96, FAR, 0.5),
    "valley": lambda at: np.where((at < 0.1) | (at > 0.9), 1.0, FAR),  # small at both ends, far between
}

MASKS = {
    "full": {"T": 150, "S": 520},
    "causal": {"T": 300, "S": 300, "keywords": CAUSAL},
    "causal-bottom-right": {"T": 150, "S": 520, "keywords": CAUSAL | BOTTOM_RIGHT},
    "window": {"T": 300, "S": 400, "keywords": {"local_window_size": (110, 30), **BOTTOM_RIGHT}},
    # Cut anywhere in a tile; the first tile read holds one key; no key at all; queries cut too.
    "lengths": {
        "T": 140,
        "S": 400,
        "batch": (4,),
        "operands": {
            "key_value_seq_lengths": cases._ints(257, 400, 0, 130),
            "query_seq_lengths": cases._ints(140, 65, 140, 129),
        },
    },
    "causal-lengths": {
        "T": 200,
        "S": 200,
        "batch": (2,),
        "keywords": CAUSAL | TOP_LEFT,
        "operands": {"key_value_seq_lengths": cases._ints(129, 70), "query_seq_lengths": cases._ints(200, 190)},
    },
}


def grown(growth: str, mask: str, **more) -> Case:
    def spoil(arrays: cases.Arrays) -> None:
        # Quarters, and factors of three bits: products and their sums are exact in float32, in any order. So large
        # scores cost no digits, and what is seen is what a kernel does with them.
        length = arrays["key"].shape[1]
        mantissa, exponent = np.frexp(GROWTHS[growth](np.arange(length) / length))
        factors = np.ldexp(np.round(mantissa * 8) / 8, exponent).astype(np.float32)
        for name in ("query", "key"):
            arrays[name][:] = np.round(arrays[name] * 4) / 4
        arrays["key"] *= factors[:, None, None]

    sizes = {"N": 2, "K": 1, "D": 64, "batch": (1,)} | MASKS[mask] | more
    return Case(f"{mask}-{growth}", "scores move away from a row's first tile", spoil=spoil, **sizes)


def _huge_values(arrays: cases.Arrays) -> None:
    """Near float16's largest number, 65504; cotangents so small that no gradient passes it."""
    arrays["value"][:] = np.clip(arrays["value"] * 2.5e4, -6e4, 6e4)
    arrays["dout"] *= np.float32(2**-12)


def _huge_scores(arrays: cases.Arrays) -> None:
    for name in ("query", "key"):
        arrays[name][:] = np.round(arrays[name] * 4) * 4


def _small_values(arrays: cases.Arrays) -> None:
    """Most of them below 2^-14, where float16 has no normal numbers left."""
    arrays["value"] *= np.float32(2**-15)
    arrays["dout"] *= np.float32(2**-14)


CASES = [
    *(grown(growth, mask) for mask in MASKS for growth in GROWTHS),
    # A maximum of unscaled scores would be the wrong end here.
    *(
        dataclasses.replace(case, id=f"{case.id}-scale{scale}", keywords={**case.keywords, "scale": scale})
        for case in (grown("falling-far", "full"), grown("rising-far", "causal"), grown("jump", "window"))
        for scale in (-0.125, 0.0)
    ),
    dataclasses.replace(
        grown("falling-far", "lengths"), id="lengths-falling-far-scales",
        operands={**MASKS["lengths"]["operands"], "scale": cases._floats(-0.125, 0.125, 0.0, 0.3)},
    ),
    Case("huge-values", "float16 values up to 6e4", 150, 520, 2, 1, 64, batch=(1,), spoil=_huge_values),
    Case("huge-values-causal", "the same, rows of few keys too", 300, 300, 2, 1, 64, batch=(1,), keywords=CAUSAL,
         spoil=_huge_values),
    Case("small-values", "float16 below its normal numbers", 60, 130, 2, 1, 64, batch=(1,), keywords=CAUSAL | TOP_LEFT,
         spoil=_small_values),
    Case("huge-scores", "scores in the hundreds everywhere", 150, 520, 2, 1, 64, batch=(1,), spoil=_huge_scores),
    Case("huge-scores-causal", "the same under a mask", 300, 300, 2, 1, 64, batch=(1,), keywords=CAUSAL,
         spoil=_huge_scores),
]  # fmt: skip


def _everywhere() -> list:
    """In 16 bits, on every backend; on a GPU in head dims whose kernels differ, which a CPU's do not."""
    found = []
    for backend in evaluate.BACKENDS:
        for dim in (64, 128, 256) if backend == "cuda" else (64,):
            sized = CASES if dim == 64 else [dataclasses.replace(case, D=dim) for case in CASES]
            for case in sized:
                name = f"{case.id}-D{dim}-{backend}"
                found += [pytest.param(case, backend, x, id=f"{name}-{x}") for x in ("bfloat16", "float16")]
    return found


@pytest.mark.parametrize(("case", "where", "kind"), _everywhere())
def test_growth(case: Case, where: str, kind: str) -> None:
    got = evaluate.kernel(case, kind, where)
    evaluate.check(got, case, kind, "out", "lse", *evaluate.names(case))
    evaluate.check_zeros(got, case, kind)


def test_the_far_cases_pass_the_range_of_a_float32() -> None:
    """Walking one way or the other, a key read late is above a row's first tile by more than 127 powers of two."""
    for case in CASES:
        if "far" in case.id and "scale" not in case.id:
            arrays = case.arrays()
            scores = np.einsum("btnd,bsd->btns", arrays["query"], arrays["key"][:, :, 0]) * case.D**-0.5
            apart = scores[..., -64:].max(-1) - scores[..., :64].max(-1)
            apart = apart if "rising" in case.id else -apart
            assert (apart / np.log(2)).max() > 127, case.id
