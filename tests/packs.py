"""Packed sequences: the list of layouts, and the truth of each, one call of the oracle for every sequence.

What takes no part in any sequence is NaN. Knows no backend and no tolerance.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cases
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import BOTTOM_RIGHT, CAUSAL, TOP_LEFT

BR, TL = CAUSAL | BOTTOM_RIGHT, CAUSAL | TOP_LEFT


@dataclasses.dataclass(frozen=True, eq=False)
class Pack:
    id: str
    edge: str
    queries: tuple[int, ...]  # of each sequence
    keys: tuple[int, ...] | None = None  # None: as queries, and cu_seqlens is one array
    N: int = 4
    K: int = 2
    D: int = 16
    Dv: int | None = None  # None: D
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    before: tuple[int, int] = (0, 0)  # queries and keys before the first sequence
    behind: tuple[int, int] = (0, 0)  # behind the last
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    operands: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unused: float = np.nan  # what rows hold that take no part
    spoil: Callable[[cases.Arrays], None] = lambda arrays: None

    @functools.cached_property
    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """cu_seqlens_q and cu_seqlens_k."""
        lengths = (self.queries, self.queries if self.keys is None else self.keys)
        return tuple(np.cumsum([n, *x]).astype(np.int32) for n, x in zip(self.before, lengths, strict=True))

    @property
    def sizes(self) -> tuple[int, int]:
        """total_q and total_k."""
        return tuple(int(x[-1]) + n for x, n in zip(self.starts, self.behind, strict=True))

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        for b in range(len(self.queries)):
            sides = zip(self.starts, (self.used_q, self.used_k), strict=True)
            yield tuple(slice(x[b], x[b + 1] if used is None else x[b] + used[b]) for x, used in sides)

    @functools.cached_property
    def visible(self) -> np.ndarray:
        """[T, S]: whether a query reads a key, row by row as one would draw it."""
        visible = np.zeros(self.sizes, bool)
        for rows, keys in self.sequences():
            t, s = rows.stop - rows.start, keys.stop - keys.start
            i, j = np.arange(t)[:, None] + (s - t if self._bottom_right else 0), np.arange(s)
            left, right = _window(self.keywords)
            visible[rows, keys] = (j >= i - left) & (j <= i + right)
        return visible

    @property
    def _bottom_right(self) -> bool:
        return self.keywords.get("causal_alignment") == "bottom_right"

    def arrays(self) -> cases.Arrays:
        """query, key, value, dout [T, N, Dv], dlse [T, N] in float32; the same ones every time."""
        (T, S), Dv = self.sizes, self.D if self.Dv is None else self.Dv
        shapes = {
            "query": (T, self.N, self.D),
            "key": (S, self.K, self.D),
            "value": (S, self.K, Dv),
            "dout": (T, self.N, Dv),
            "dlse": (T, self.N),
        }
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        self.spoil(arrays)
        outside = np.ones(T, bool)
        for rows, _ in self.sequences():
            outside[rows] = False
        reads, read = self.visible.any(1), self.visible.any(0)
        for name, at in (("query", ~reads), ("dout", ~reads), ("key", ~read), ("value", ~read)):
            arrays[name][at] = self.unused
        arrays["dlse"][outside if "sinks" in self.operands else ~reads] = self.unused
        return arrays

    def numbers(self) -> dict[str, np.ndarray]:
        """The arguments that say where sequences are. cu_seqlens stands for both where they are one array."""
        starts = {"cu_seqlens_q": self.starts[0], "cu_seqlens_k": self.starts[1]}
        if self.keys is None:
            starts = {"cu_seqlens": self.starts[0]}
        used = {"seqused_q": self.used_q, "seqused_k": self.used_k}
        return starts | {name: np.array(x, np.int32) for name, x in used.items() if x is not None}


def _window(keywords: Mapping[str, Any]) -> tuple[float, float]:
    window = keywords.get("local_window_size")
    left, right = window if isinstance(window, tuple) else (window, window)
    left, right = (np.inf if side is None else side for side in (left, right))
    return left, min(right, 0) if keywords.get("is_causal") else right


def names(pack: Pack) -> tuple[str, ...]:
    return evaluate.names(pack)


def truth(pack: Pack, dtype: str, *, wide: bool) -> evaluate.Result:
    """out, lse and gradients; `wide` or in the precision that a kernel accumulates in."""
    double = dtype == "float64"
    real = (np.longdouble if double else np.float64) if wide else (np.float64 if double else np.float32)
    arrays = evaluate.rounded(pack.arrays(), dtype)
    keywords = {name: x for name, x in pack.keywords.items() if name != "deterministic"}
    operands = dict(pack.operands)
    if "dropout_rng" in operands:
        operands["dropout_seeds"] = np.asarray(jax.random.bits(operands.pop("dropout_rng"), (pack.N, 2)))
    result = {"out": np.zeros(arrays["dout"].shape, real), "lse": np.full(arrays["dlse"].shape, -np.inf, real)}
    sides = {"query": 0, "key": 1, "value": 1}
    result |= {f"d{name}": np.zeros((arrays | operands)[name].shape, real) for name in ("query", "key", "value")}
    result |= {f"d{name}": np.zeros(x.shape, real) for name, x in operands.items() if x.dtype.kind == "f"}
    for at in pack.sequences():
        rows, keys = at
        if rows.stop == rows.start:
            continue
        qkv = {name: arrays[name][at[side]] for name, side in sides.items()}
        got = oracle.attention(
            **qkv, dout=arrays["dout"][rows], dlse=arrays["dlse"][rows], **keywords, **operands,
            dropout_at=(rows.start, keys.start), real=real, p_from_lse=not wide,
        )  # fmt: skip
        result["out"][rows], result["lse"][rows] = got["out"], got["lse"]
        for name in result:
            if name.startswith("d"):
                result[name][at[sides[name[1:]]] if name[1:] in sides else ...] += got[name]
    return result


def run(call: Any, pack: Pack, dtype: str, backend: str, options: Any = None, **more: Any) -> evaluate.Result:
    """Every result and gradient of `call`, which is varlen_attention or has its arguments."""
    keywords = dict(pack.keywords) | {"max_seqlen_q": 512, "max_seqlen_k": 512} | more

    def packed(*, cu_seqlens: Any = None, **given: Any) -> Any:
        if cu_seqlens is not None:
            given |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        return call(**given, **keywords)

    with jax.enable_x64(dtype == "float64"), jax.default_device(jax.devices(backend)[0]):
        given = evaluate.rounded(pack.arrays(), dtype) | dict(pack.operands) | pack.numbers()
        arrays = {name: jnp.asarray(x) for name, x in given.items()}
        cotangents = arrays.pop("dout"), arrays.pop("dlse")
        primals = {name[1:]: arrays.pop(name[1:]) for name in names(pack)}
        result = jax.jit(evaluate.differentiated(packed, {}), compiler_options=options)(primals, arrays, cotangents)
        return jax.tree.map(np.asarray, result)


def check(got: evaluate.Result, pack: Pack, dtype: str) -> None:
    """Within the bound of jax_flash2.testing, and exactly 0 in what takes no part."""
    exact, plain = truth(pack, dtype, wide=True), truth(pack, dtype, wide=False)
    for name in ("out", "lse", *names(pack)):
        own = got[name].dtype
        if name != "lse":
            own = max(own, jnp.dtype(dtype), key=lambda x: float(jnp.finfo(x).eps))
        xs = [x[name] for x in (got, plain, exact)]
        if name[1:] in pack.operands:  # a sum over all rows of numbers of order 1, which may cancel
            xs = [np.append(np.ravel(x), 1) for x in xs]
        evaluate.assert_accurate(*xs, own, name)
    reads, read = pack.visible.any(1), pack.visible.any(0)
    for name, at in (("out", ~reads), ("dquery", ~reads), ("dkey", ~read), ("dvalue", ~read)):
        np.testing.assert_array_equal(got[name][at], 0, err_msg=name)


def _large(arrays: cases.Arrays) -> None:
    for name in ("query", "key"):
        arrays[name] *= np.float32(3)
    arrays["dout"][:] = 0.125


_LONG = {"queries": (150, 1, 129, 64, 70), "keys": (257, 60, 0, 129, 65)}
_SLOPES, _SINKS = cases._floats(0.5, 0.25, 0.0, -0.125), cases._floats(0.25, -1.0, 2.0, 0.0)

PACKS = [
    Pack("past-the-end", "arrays longer than the last end", (40, 60, 28), N=4, K=4, behind=(32, 32), keywords=CAUSAL),
    Pack("padded", "padding between short sequences, which holds large numbers", (12, 8, 8, 12, 8, 12), N=2, K=2, D=64,
         used_q=(9, 8, 8, 12, 8, 12), used_k=(9, 8, 8, 12, 8, 12), keywords=BR, unused=1e4),
    Pack("one-key-each", "many queries, of which the last one alone reads the one key", (76, 34, 146), (1, 1, 1), N=1,
         K=1, D=32, keywords=BR, spoil=_large),
    Pack("empty", "no queries, no keys, neither", (0, 5, 0, 0, 7, 0), (4, 0, 0, 3, 9, 0)),
    Pack("empty-causal", "the same, cut", (0, 5, 0, 0, 7, 0), (4, 0, 0, 3, 9, 0), keywords=BR),
    Pack("rows", "many sequences of a row", (1,) * 70, (1,) * 70),
    Pack("rows-wide", "one query each, as a decoding step", (1,) * 9, (70, 1, 3, 0, 129, 8, 64, 1, 30), keywords=BR),
    Pack("whole", "one sequence, which is all there is", (131,), keywords=CAUSAL),
    Pack("one", "one query, one key", (1,), (1,), keywords=BR),
    Pack("none", "no sequence at all", (), (), behind=(5, 6)),
    Pack("long", "tiles that many sequences share, and sequences of many tiles", **_LONG),
    Pack("long-top-left", "every sequence has a diagonal of its own", **_LONG, keywords=TL),
    Pack("long-bottom-right", "from the other corner", **_LONG, keywords=BR, behind=(3, 1)),
    Pack("window", "both ends are kept", **_LONG, N=2, keywords={"local_window_size": (70, 5), **BOTTOM_RIGHT}),
    Pack("window-top-left", "rows behind the last key's reach", **_LONG, N=2, before=(2, 5),
         keywords={"local_window_size": (9, None), **TOP_LEFT}),
    Pack("window-zero", "each query reads its own position", (33, 7, 40), keywords={"local_window_size": 0}),
    Pack("gaps", "gaps of many tiles on either side", (300, 130, 70, 64), (200, 130, 150, 90), before=(3, 70),
         behind=(66, 0), used_q=(5, 129, 0, 64), used_k=(190, 3, 150, 0)),
    Pack("gaps-causal", "the corner is that of what is used", (300, 130, 70, 64), (200, 130, 150, 90), before=(70, 3),
         behind=(0, 66), used_q=(5, 129, 33, 64), used_k=(190, 3, 150, 9), keywords=BR),
    Pack("mqa", "every query head reads the one key head", (20, 33), (41, 8), N=5, K=1, keywords=BR),
    Pack("gqa", "12 heads on 3; Dv above D", (20, 33), (41, 8), N=12, K=3, Dv=24, keywords=TL),
    Pack("dims", "odd, and Dv below D", (20, 33), (41, 8), D=63, Dv=40),
    Pack("dims-large", "the largest", (20, 70), (66, 8), N=2, K=1, D=256, keywords=BR),
    Pack("alibi", "distances within a sequence", **_LONG, keywords=BOTTOM_RIGHT, operands={"alibi_slopes": _SLOPES}),
    Pack("alibi-top-left", "under a window", (20, 33, 9), (41, 8, 30), behind=(4, 4),
         keywords={"local_window_size": (20, 3), **TOP_LEFT}, operands={"alibi_slopes": _SLOPES}),
    Pack("sinks", "a row without keys has lse = sink, one in no sequence has none", (9, 7, 20, 6), (5, 0, 12, 6),
         before=(2, 0), behind=(4, 3), used_q=(9, 7, 14, 0), keywords=BR, operands={"sinks": _SINKS}),
    Pack("soft-cap", "under a traced scale", (45, 33), (41, 50), keywords={"logits_soft_cap": 3.0, **BR},
         operands={"scale": np.float32(0.75).reshape(())}),
    Pack("dropout", "positions are those in the pack", (11, 20, 5), (30, 9, 21), before=(3, 6),
         keywords={"dropout_rate": 0.3}, operands={"dropout_rng": np.array([7, 11], np.uint32)}),
    Pack("deterministic", "another order of the same sums", **_LONG, keywords={"deterministic": True, **BR}),
    Pack("everything", "all keywords at once", (21, 30, 9), (28, 17, 22), Dv=24, used_q=(20, 30, 8),
         used_k=(28, 15, 3), before=(2, 1), behind=(1, 5),
         keywords={"dropout_rate": 0.25, "logits_soft_cap": 4.0, "local_window_size": (18, 3), **BOTTOM_RIGHT},
         operands={"dropout_rng": np.array([1, 2], np.uint32), "alibi_slopes": _SLOPES, "sinks": _SINKS,
                   "scale": np.float32(0.5).reshape(())}),
]  # fmt: skip
assert len({pack.id for pack in PACKS}) == len(PACKS)
