"""THE list of numeric cases. Each row is an edge; every row runs forward and backward, in every dtype of every backend.

Sizes are awkward on purpose: each dim distinct and above 1 where the edge allows it, so that a swapped axis or a lost
stride shows. Values are float32-exact, and cotangents of out and lse are random. Knows no backend and no tolerance.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    id: str
    edge: str  # what it guards
    T: int
    S: int
    N: int
    K: int
    D: int
    Dv: int | None = None  # None: D
    batch: tuple[int, ...] = (2,)
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of attention(); tuples of ints are static
    operands: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # likewise, but arrays
    spoil: Callable[[Arrays], None] = lambda arrays: None  # changes the random arrays in place

    def arrays(self) -> Arrays:
        """query, key, value, dout [*B, T, N, Dv], dlse [*B, T, N] in float32; the same ones every time."""
        Dv = self.D if self.Dv is None else self.Dv
        shapes = {
            "query": (self.T, self.N, self.D),
            "key": (self.S, self.K, self.D),
            "value": (self.S, self.K, Dv),
            "dout": (self.T, self.N, Dv),
            "dlse": (self.T, self.N),
        }
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        arrays = {name: rng.standard_normal((*self.batch, *shape), np.float32) for name, shape in shapes.items()}
        self.spoil(arrays)
        return arrays


def _ints(*x: int) -> np.ndarray:
    return np.array(x, np.int32)


def _floats(*x: float) -> np.ndarray:
    return np.array(x, np.float32)


def _multiply(**factors: float) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        for name, factor in factors.items():
            arrays[name] *= np.float32(factor)

    return spoil


def _very_negative(arrays: Arrays) -> None:
    arrays["query"][:] = arrays["query"] / 8 + 4.5
    arrays["key"][:] = arrays["key"] / 8 - 4.5


def _nan_where_unread(arrays: Arrays) -> None:
    """For query lengths (5, 0, 9) and key lengths (0, 4, 7)."""
    for b, (t, s) in enumerate(((5, 0), (0, 4), (9, 7))):
        for name in ("key", "value"):
            arrays[name][b, s if t else 0 :] = np.nan
        for name, bad in (("query", np.nan), ("dout", np.inf), ("dlse", np.nan)):
            arrays[name][b, t if s else 0 :] = bad


def _nan_outside_the_window(arrays: Arrays) -> None:
    """For T = 7, S = 29, top left, window (2, 3): keys from 10 on."""
    arrays["key"][:, 10:] = np.nan
    arrays["value"][:, 10:] = np.inf


def _nan_in_queries_past_the_keys(arrays: Arrays) -> None:
    """For T = 29, S = 7, top left, window (2, 3): queries from 9 on."""
    for name in ("query", "dout", "dlse"):
        arrays[name][:, 9:] = np.nan


TOP_LEFT = {"causal_alignment": "top_left"}
BOTTOM_RIGHT = {"causal_alignment": "bottom_right"}
CAUSAL = {"is_causal": True}

CASES = [
    # Tiles: lengths that end just behind, just before and within the tiles of any backend.
    Case("tiles-behind", "one row and one key in a tile of their own", 129, 257, 4, 2, 16),
    Case("tiles-before", "the last row and key of a tile missing", 127, 191, 3, 1, 40),
    Case("tiles-causal", "full, cut and skipped tiles on both sides of the diagonal", 203, 203, 3, 1, 32,
         keywords=CAUSAL),
    Case("tiles-window", "full tiles between two cut ones", 150, 311, 2, 2, 24,
         keywords={"local_window_size": (140, 70), **BOTTOM_RIGHT}),
    # Alignment of the diagonal.
    Case("causal-square", "no alignment needed", 37, 37, 4, 2, 24, keywords=CAUSAL),
    Case("causal-top-left-wide", "the last keys are read by nobody", 19, 45, 6, 2, 16, keywords=CAUSAL | TOP_LEFT),
    Case("causal-top-left-tall", "the last queries read every key", 45, 19, 6, 2, 16, keywords=CAUSAL | TOP_LEFT),
    Case("causal-bottom-right-wide", "the first query reads many keys", 19, 70, 6, 2, 16,
         keywords=CAUSAL | BOTTOM_RIGHT),
    Case("causal-bottom-right-tall", "the first queries read nothing", 70, 19, 6, 2, 16,
         keywords=CAUSAL | BOTTOM_RIGHT),
    # Windows.
    Case("window-both", "both ends are kept", 31, 47, 4, 2, 16, keywords={"local_window_size": (3, 5), **TOP_LEFT}),
    Case("window-int", "an int is both sides", 41, 41, 4, 2, 16, keywords={"local_window_size": 6}),
    Case("window-zero", "each query reads its own position only", 23, 23, 4, 2, 16, keywords={"local_window_size": 0}),
    Case("window-left", "open to the future", 13, 40, 6, 3, 32,
         keywords={"local_window_size": (7, None), **BOTTOM_RIGHT, "logits_soft_cap": 5.0}),
    Case("window-right", "open to the past", 40, 13, 6, 3, 32, keywords={"local_window_size": (None, 4), **TOP_LEFT}),
    Case("window-causal", "the causal end is tighter", 53, 53, 2, 1, 16,
         keywords={"local_window_size": (9, 30), **CAUSAL}),
    Case("window-wide", "wider than everything: no window", 17, 29, 4, 2, 16,
         keywords={"local_window_size": (2**40, 2**31 - 1), **BOTTOM_RIGHT}),
    Case("window-runs-out", "top left, queries behind the last key's reach read nothing", 60, 21, 4, 2, 16,
         keywords={"local_window_size": (5, 2), **TOP_LEFT}),
    # Lengths. The first row is full, one is empty, one past the end (clamped), one negative (clamped).
    Case("key-lengths", "keys past the length are read by nobody", 21, 33, 4, 2, 16, batch=(5,),
         operands={"key_value_seq_lengths": _ints(33, 0, 99, -4, 7)}),
    Case("query-lengths", "queries past the length read nothing", 33, 21, 4, 2, 16, batch=(5,),
         operands={"query_seq_lengths": _ints(33, 0, 99, -4, 7)}),
    Case("lengths-bottom-right", "the diagonal ends at each row's own corner", 21, 33, 4, 2, 16, batch=(6,),
         keywords=CAUSAL | BOTTOM_RIGHT,
         operands={"query_seq_lengths": _ints(21, 0, 7, 20, 40, 3),
                   "key_value_seq_lengths": _ints(33, 12, 5, 1, 40, 0)}),
    Case("lengths-top-left", "lengths do not move the diagonal", 21, 33, 4, 2, 16, batch=(3,),
         keywords={"local_window_size": (4, 6), **TOP_LEFT},
         operands={"query_seq_lengths": _ints(9, 21, 2), "key_value_seq_lengths": _ints(6, 20, 33)}),
    Case("lengths-square", "T = S, but the lengths differ", 27, 27, 4, 2, 16, batch=(3,),
         keywords=CAUSAL | BOTTOM_RIGHT,
         operands={"key_value_seq_lengths": _ints(27, 11, 2)}),
    # Scale.
    Case("scale-negative", "the running maximum is of scaled scores", 19, 34, 2, 1, 8,
         keywords={"scale": -0.75, **CAUSAL, **TOP_LEFT}),
    Case("scale-zero", "a plain mean", 9, 14, 2, 1, 8, keywords={"scale": 0.0}),
    Case("scale-array", "a traced scalar has a gradient", 22, 35, 4, 2, 16, keywords=CAUSAL | BOTTOM_RIGHT,
         operands={"scale": np.float32(0.25).reshape(())}),
    Case("scale-rows", "one scale a batch row: negative, zero, positive; under a cap", 22, 35, 4, 2, 16, batch=(3,),
         keywords={"logits_soft_cap": 3.0}, operands={"scale": _floats(-0.5, 0.0, 0.75)}),
    # Soft cap.
    Case("softcap", "scores far above the cap", 48, 36, 4, 2, 64,
         keywords={"logits_soft_cap": 15.0, **CAUSAL, **TOP_LEFT},
         spoil=_multiply(query=4, key=4)),
    # Heads and batch axes.
    Case("mqa", "every query head reads the one key head", 26, 39, 5, 1, 16, keywords=CAUSAL | BOTTOM_RIGHT),
    Case("gqa", "12 heads on 3: head n reads n // 4; Dv above D", 40, 28, 12, 3, 16, 48),
    Case("heads-alike", "no groups: key gradients need no reduction", 26, 39, 3, 3, 16, keywords=CAUSAL | BOTTOM_RIGHT),
    Case("no-batch", "no batch axis", 18, 25, 4, 2, 16, batch=(), keywords=CAUSAL | TOP_LEFT),
    Case("two-batch-axes", "lengths shared along the first, scale along the second", 18, 25, 4, 2, 16, batch=(2, 3),
         operands={"key_value_seq_lengths": _ints(25, 3, 14).reshape(1, 3), "scale": _floats(0.5, 0.25).reshape(2, 1)}),
    # Head dims: 1, odd, not a multiple of 8 or 16, between the compiled ones, the largest, and D != Dv.
    Case("dim-1", "one column", 20, 30, 4, 2, 1),
    Case("dim-7", "less than any vector register", 20, 30, 4, 2, 7, keywords=CAUSAL | TOP_LEFT),
    Case("dim-63", "odd; the default scale is 63 ** -0.5", 50, 30, 4, 2, 63),
    Case("dim-72", "a multiple of 8 only", 30, 50, 4, 2, 72, keywords=CAUSAL | BOTTOM_RIGHT),
    Case("dim-90", "a multiple of 2 only", 30, 50, 4, 2, 90, 34),
    Case("dim-100", "a multiple of 4 only", 30, 50, 4, 2, 100),
    Case("dim-128-96", "whole panels, and fewer of Dv", 70, 40, 4, 2, 128, 96, keywords=CAUSAL | TOP_LEFT),
    Case("dim-160", "between instances", 70, 33, 2, 1, 160, keywords=CAUSAL | TOP_LEFT),
    Case("dim-192-128", "Dv below D", 33, 70, 2, 1, 192, 128, keywords=CAUSAL | BOTTOM_RIGHT),
    Case("dim-256", "the largest", 35, 66, 2, 1, 256),
    # Lengths of one.
    Case("one-query", "a decoding step", 1, 83, 8, 2, 32, batch=(3,), keywords=CAUSAL | BOTTOM_RIGHT,
         operands={"key_value_seq_lengths": _ints(83, 1, 40)}),
    Case("one-key", "softmax over one key is 1", 31, 1, 4, 2, 16),
    Case("many-keys", "few queries, many tiles of keys", 3, 1031, 4, 2, 24),
    # Numbers.
    Case("saturated", "one key wins by many nats", 35, 64, 2, 1, 64, spoil=_multiply(query=60, key=60)),
    Case("very-negative", "every lse below -88: exp(0 - lse) of padding would overflow", 69, 75, 2, 1, 64,
         keywords=CAUSAL | BOTTOM_RIGHT, spoil=_very_negative),
    Case("nan-past-lengths", "what nobody reads may be NaN", 9, 11, 4, 2, 16, batch=(3,), spoil=_nan_where_unread,
         operands={"query_seq_lengths": _ints(5, 0, 9), "key_value_seq_lengths": _ints(0, 4, 7)}),
    Case("nan-outside-window-wide", "keys that no window reaches may be NaN", 7, 29, 4, 2, 16,
         keywords={"local_window_size": (2, 3), **TOP_LEFT}, spoil=_nan_outside_the_window),
    Case("nan-outside-window-tall", "queries whose window reaches no key may be NaN", 29, 7, 4, 2, 16,
         keywords={"local_window_size": (2, 3), **TOP_LEFT}, spoil=_nan_in_queries_past_the_keys),
    Case("deterministic", "another order of the same sums", 75, 66, 4, 2, 32,
         keywords={"deterministic": True} | CAUSAL | TOP_LEFT),
]  # fmt: skip


def _random(name: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)


def _bias(*shape: int, **places: tuple[Any, float]) -> np.ndarray:
    bias = _random("bias", *shape)
    for at, value in places.values():
        bias[at] = value
    return bias


def _mask(*shape: int) -> np.ndarray:
    """Random, but query 3 reads nothing and nobody reads key 5."""
    mask = _random("mask", *shape) > -0.5
    mask[..., 3 % shape[-2], :] = mask[..., 5] = False
    return mask


def _nan_where_masked(arrays: Arrays) -> None:
    """For _mask."""
    for name, at in (("query", 3), ("dout", 3), ("dlse", 3), ("key", 5), ("value", 5)):
        arrays[name][:, at] = np.nan


LOWEST = float(np.finfo(np.float32).min)
SEGMENTS_Q = np.repeat([[0, 1, 4, -1], [3, -2, 7, 9]], [4, 6, 8, 3], axis=1)  # [2, 21]
SEGMENTS_K = np.repeat([[0, 1, 2, -1], [3, -2, 7, 8]], [5, 9, 10, 4], axis=1)  # [2, 28]


def _nan_where_segments_miss(arrays: Arrays) -> None:
    for b in range(2):
        for mine, other, names in (
            (SEGMENTS_Q[b], SEGMENTS_K[b], ("query", "dout", "dlse")),
            (SEGMENTS_K[b], SEGMENTS_Q[b], ("key", "value")),
        ):
            unread = (mine < 0) | ~np.isin(mine, other)
            for name in names:
                arrays[name][b, unread] = np.nan


# What operands do to each pair of a query and a key.
OPERAND_CASES = [
    Case("bias", "of full shape", 20, 28, 4, 2, 16, operands={"bias": _bias(2, 4, 20, 28)}),
    Case("bias-shared-batch", "its gradient is summed over the batch", 20, 28, 4, 2, 16,
         operands={"bias": _bias(1, 4, 20, 28)}),
    Case("bias-shared-heads", "its gradient is summed over heads", 20, 28, 4, 2, 16,
         operands={"bias": _bias(2, 1, 20, 28)}),
    Case("bias-keys", "one value a key", 20, 28, 4, 2, 16, operands={"bias": _bias(1, 1, 1, 28)}),
    Case("bias-queries", "one value a query changes nothing but lse", 20, 28, 4, 2, 16,
         operands={"bias": _bias(2, 1, 20, 1)}),
    Case("bias-infinite", "only a true -inf removes a key, and a row of them is empty", 20, 28, 4, 2, 16,
         operands={"bias": _bias(2, 4, 20, 28, key=(np.s_[..., 3], -np.inf), row=(np.s_[:, 1, 6], -np.inf))}),
    Case("bias-lowest", "finfo.min is a number: a row of it is a plain mean", 20, 28, 4, 2, 16,
         operands={"bias": _bias(2, 4, 20, 28, row=(np.s_[:, 1, 6], LOWEST), some=(np.s_[..., 7, :9], LOWEST))}),
    Case("bias-lowest-float16", "the same of a bias in 16 bits", 20, 28, 4, 2, 16, keywords=CAUSAL | BOTTOM_RIGHT,
         operands={"bias": _bias(2, 1, 20, 28, row=(np.s_[0, :, 6:], -65504), some=(np.s_[1, ..., 11:], -65504))
                   .astype(np.float16)}),
    Case("mask", "a row that reads nothing, a key nobody reads, both NaN", 21, 28, 4, 2, 16, spoil=_nan_where_masked,
         operands={"mask": _mask(2, 1, 21, 28)}),
    Case("mask-heads", "heads of a group read different keys; one mask for all queries", 21, 28, 4, 2, 16,
         keywords=CAUSAL | TOP_LEFT,
         operands={"mask": np.insert(_mask(1, 4, 1, 27) | True, 5, [[[False], [True], [True], [False]]], axis=-1)}),
    Case("alibi", "slopes of the heads, from the bottom right", 17, 28, 4, 2, 16, keywords=CAUSAL | BOTTOM_RIGHT,
         operands={"alibi_slopes": _floats(0.5, 0.25, 0.0, -0.125)}),
    Case("alibi-rows", "slopes of each row and head, from each row's own corner", 17, 28, 4, 2, 16,
         keywords=BOTTOM_RIGHT,
         operands={"alibi_slopes": _random("slopes", 2, 4), "key_value_seq_lengths": _ints(28, 9),
                   "query_seq_lengths": _ints(8, 17)}),
    Case("sinks", "rows without keys have lse = sink; rows past the query length have none", 18, 23, 4, 2, 16,
         batch=(3,),
         operands={"sinks": _floats(0.25, -1.0, 2.0, 0.0), "key_value_seq_lengths": _ints(23, 0, 4),
                   "query_seq_lengths": _ints(18, 7, 5)}),
    Case("sinks-rows", "far above and far below every score", 18, 23, 4, 2, 16,
         operands={"sinks": 50 * _random("sinks", 2, 4)}),
    Case("segments", "equal ids see each other; negative ones are padding", 21, 28, 4, 2, 16,
         keywords=CAUSAL | TOP_LEFT,
         operands={"query_segment_ids": SEGMENTS_Q, "key_value_segment_ids": SEGMENTS_K}),
    Case("segments-nan", "what is padding may be NaN, and so may documents that only one side has", 21, 28, 4, 2, 16,
         spoil=_nan_where_segments_miss,
         operands={"query_segment_ids": SEGMENTS_Q, "key_value_segment_ids": SEGMENTS_K}),
    Case("segments-packed", "several tiles of documents, most pairs of tiles without a common one", 150, 290, 2, 1, 16,
         keywords=CAUSAL | BOTTOM_RIGHT,
         operands={"query_segment_ids": np.repeat([[2, 3, 4, 5], [4, 5, 6, 7]], [40, 5, 35, 70], axis=1),
                   "key_value_segment_ids": np.repeat([[2, 3, 4, 5], [3, 4, 5, 6]], [80, 10, 70, 130], axis=1)}),
    Case("bias-tiles", "many tiles, some of them empty; summed over heads and queries", 150, 290, 4, 2, 16,
         operands={"bias": _bias(2, 1, 1, 290, gap=(np.s_[..., 100:270], -np.inf))}),
    Case("mask-tiles", "a band given as a mask: empty, cut and full tiles", 150, 290, 4, 2, 16,
         operands={"mask": np.abs(np.arange(150)[:, None] * 2 - np.arange(290))[None, None] < 70}),
    Case("mask-holes", "in every tile; rows at multiples of 16 bytes; ends inside a tile", 150, 304, 4,
         2, 16, spoil=_nan_where_masked, operands={"mask": _mask(1, 4, 150, 304)}),
    Case("mask-holes-lengths", "the same beside a bias and lengths that cut it", 150, 144, 4, 2, 16,
         operands={"mask": _mask(2, 1, 150, 144), "bias": _bias(1, 4, 1, 144),
                   "query_seq_lengths": _ints(150, 71), "key_value_seq_lengths": _ints(131, 144)}),
    Case("alibi-tiles", "many tiles of keys", 70, 530, 4, 2, 16, keywords=TOP_LEFT,
         operands={"alibi_slopes": _floats(0.5, 0.25, 0.0, -0.01)}),
    Case("alibi-steep", "scores that rise and fall by more than float32 holds, tile after tile", 70, 530, 4, 2, 16,
         keywords=TOP_LEFT, operands={"alibi_slopes": _floats(2.0, -2.0, 0.5, -0.5)}),
    Case("alibi-far", "queries that stand far from all keys", 530, 70, 4, 2, 16, keywords=TOP_LEFT,
         operands={"alibi_slopes": _floats(8.0, -8.0, 4.0, 2.0)}),
    Case("dropout-tiles", "blocks of random words cut by tiles and by the ends", 149, 301, 4, 2, 16,
         keywords={"dropout_rate": 0.4} | CAUSAL | BOTTOM_RIGHT, operands={"dropout_rng": np.array([9, 1], np.uint32)}),
    Case("dropout", "kept elements are the oracle's", 37, 29, 4, 2, 16, keywords={"dropout_rate": 0.3},
         operands={"dropout_rng": np.array([7, 11], np.uint32)}),
    Case("everything", "all keywords at once", 21, 28, 4, 2, 16, 24,
         keywords={"dropout_rate": 0.25, "logits_soft_cap": 4.0, "local_window_size": (18, 3), **BOTTOM_RIGHT},
         operands={"dropout_rng": np.array([1, 2], np.uint32), "bias": _bias(1, 4, 21, 28), "mask": _mask(2, 1, 21, 28),
                   "alibi_slopes": _floats(0.5, 0.25, 0.125, 0.0625), "sinks": _floats(0.5, -0.5, 1.0, 2.0),
                   "query_segment_ids": SEGMENTS_Q.clip(0, 3), "key_value_segment_ids": SEGMENTS_K.clip(0, 3),
                   "query_seq_lengths": _ints(21, 15), "key_value_seq_lengths": _ints(20, 28),
                   "scale": _floats(0.5, -0.25)}),
]  # fmt: skip

_RIGHT = {"causal_alignment": "bottom_right"}
# Every feature, for the shapes of `_together`: keywords and operands. A name that ends in a digit is another way of the
# same feature.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": (CAUSAL | _RIGHT, {}),
    "window": ({"local_window_size": (17, 4)} | _RIGHT, {}),
    "lengths": ({}, {"query_seq_lengths": _ints(39, 24), "key_value_seq_lengths": _ints(25, 51)}),
    "soft cap": ({"logits_soft_cap": 3.0}, {}),
    "scale": ({}, {"scale": _floats(0.5, -0.25)}),
    "mask": ({}, {"mask": _mask(2, 1, 39, 51)}),
    "mask2": ({}, {"mask": _mask(1, 6, 39, 51)}),
    "segments": ({}, {"query_segment_ids": np.repeat([[0, 1, -1], [2, 5, 3]], [11, 20, 8], axis=1),
                      "key_value_segment_ids": np.repeat([[0, 1, 2], [2, 3, -7]], [13, 30, 8], axis=1)}),
    "bias": ({}, {"bias": _bias(1, 6, 39, 51, some=(np.s_[:, 1, :20, 9], -np.inf))}),
    "bias2": ({}, {"bias": _bias(2, 1, 1, 51)}),
    "alibi": (_RIGHT, {"alibi_slopes": _random("slopes", 2, 6) / 8}),
    "sinks": ({}, {"sinks": _random("sinks", 6)}),
    "dropout": ({"dropout_rate": 0.2}, {"dropout_rng": np.array([3, 4], np.uint32)}),
    "groups": ({}, {}),
    "deterministic": ({"deterministic": True}, {}),
}  # fmt: skip


def together(*features: str, size: int = 16) -> Case:
    """These features in one call; without "groups" every query head has keys of its own."""
    keywords, operands = ({k: v for name in features for k, v in FEATURES[name][i].items()} for i in (0, 1))
    return Case("+".join(features), "together", 39, 51, 6, 2 if "groups" in features else 6, size, size + 8,
                keywords=keywords, operands=operands)  # fmt: skip


def _pairs() -> list[Case]:
    """Few cases in which every feature meets every other: the next one always takes what still misses most."""
    alone = [{a, b} for a, b in itertools.combinations(FEATURES, 2) if a.rstrip("2") == b.rstrip("2")]
    missing = [{a, b} for a, b in itertools.combinations(FEATURES, 2) if {a, b} not in alone]
    found = []
    while missing:
        chosen: list[str] = []
        while len(chosen) < 6:
            free = [x for x in FEATURES if x not in chosen and not any({x, y} in alone for y in chosen)]
            gain = {x: (sum({x, y} in missing for y in chosen), sum(x in pair for pair in missing)) for x in free}
            chosen.append(max(free, key=lambda x: gain[x]))
        missing = [pair for pair in missing if not pair <= set(chosen)]
        found.append(together(*sorted(chosen, key=list(FEATURES).index)))
    return found


PAIRS = _pairs()
ALL = CASES + OPERAND_CASES
assert len({case.id for case in ALL}) == len(ALL)
