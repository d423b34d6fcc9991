"""Row by row, which keys a query may read: the operands key_spans, query_spans and span_flags, from mask and ids.

With them kernels skip the tiles that mask and ids leave empty, walk bare the tiles that they leave whole, and load
zeros for what is dead, which may hold NaN. Rules in src/core/spec.h. Ids cost a search, never T x S work; a mask alone
is read once, by a kernel of its own, and beside other operands once by rows and once by columns. Nothing here waits for
the host.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import ffi, lax
from jax import numpy as jnp

from jax_flash2 import _compat, _mask, _reads, _search
from jax_flash2._arrays import Dims
from jax_flash2._spec import AttentionSpec

EXTENTS_TARGET = "jax_flash2_extents_v1"  # mask -> what src/cuda/extents.h says of its rows, and of its columns

_PADDING = np.uint32(0xFFFFFFFF)  # behind every id
_IDS = np.uint32(0x7FFFFFFF)  # what ids are counted modulo
_MANY = np.int32(1 << 30)  # more than any length


def has_source(operands: Sequence[str]) -> bool:
    return "key_spans" not in operands and ("mask" in operands or "query_ids" in operands)


def of(
    operands: Sequence[str], xs: Sequence[Any], spec: AttentionSpec, *, native: bool = False
) -> dict[str, jax.Array]:
    """key_spans [*#B, T, 2], query_spans [*#B, S, 2] and span_flags [*#B].

    native: in a program for CUDA; a kernel reads a mask that stands alone.
    """
    dims = Dims(operands, xs)
    names = [name for name in ("query_lens", "key_lens", "mask", "query_ids", "key_ids") if name in operands]
    x = dict(zip(names, _compat.match_varying([dims.avals[name] for name in names]), strict=True))
    T, S = dims.sizes["T"], dims.sizes["S"]
    mask = x.get("mask")
    if mask is None or (mask.shape[-3] == 1 and 1 in mask.shape[-2:]):
        by_query, by_key, exact = _from_ids(*_ids(x, T, S), x, T, S, spec, list(x) == ["query_ids"])
    else:
        unbounded = spec.window_left < 0 and spec.window_right < 0
        alone = list(x) == ["mask"] and unbounded and mask.shape[-2:] == (T, S) and isinstance(T, int)
        if native and alone and isinstance(S, int):
            sides = _extents(mask)
        else:
            keep = _reads.pairs(x, dims, spec)
            sides = [_reduced(keep, keep.ndim - 1), _reduced(keep, keep.ndim - 2)]
        by_query, by_key, exact = _from_sides(sides, mask.shape[-3], T, S)
    key_spans, query_spans = _mask.spans(*by_query), _mask.spans(*by_key)
    alive = jnp.all(key_spans[..., 0] >= 0, -1) & jnp.all(query_spans[..., 0] >= 0, -1)
    flags = _mask.span_flags(exact, alive)
    return {"key_spans": key_spans, "query_spans": query_spans, "span_flags": flags}


class _Rows(NamedTuple):
    """An interval for each row, int32 [*#B, rows] each, and whether the row takes part at all."""

    begin: Any
    end: Any
    alive: Any


def _iota(count: Any) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


# From ids. Where both sides have them in order, a search gives each row exactly what it reads. Else the bounds of
# lengths and windows stand, and kernels compare the ids pair by pair.


def _ids(x: dict[str, Any], T: Any, S: Any) -> tuple[Any, Any]:
    """[*#B, T] and [*#B, S], with the mask folded in: one value a query, or one a key."""
    mask = x.get("mask")
    if "query_ids" in x:
        query_ids, key_ids = x["query_ids"], x.get("key_ids", x["query_ids"])
    else:
        lead = (1,) * (mask.ndim - 3)  # type: ignore[union-attr]
        query_ids, key_ids = jnp.zeros((*lead, T), jnp.int32), jnp.zeros((*lead, S), jnp.int32)
    if mask is not None and mask.shape[-2] == 1:
        key_ids = jnp.where(mask[..., 0, 0, :], key_ids, -1)
    elif mask is not None:
        query_ids = jnp.where(mask[..., 0, :, 0], query_ids, -1)
    return query_ids, key_ids


def _from_ids(
    query_ids: Any, key_ids: Any, x: dict[str, Any], T: Any, S: Any, spec: AttentionSpec, aligned: bool
) -> tuple[_Rows, _Rows, Any]:
    """aligned: the two are one array and there are no lengths, so that whoever is no padding reads its own position."""
    query_len, key_len = _mask.length(x.get("query_lens"), T, 1), _mask.length(x.get("key_lens"), S, 1)
    query_ids = jnp.where(_iota(T) < query_len, query_ids, -1)
    key_ids = jnp.where(_iota(S) < key_len, key_ids, -1)
    # Counted from the first document on, so that ids in order may go on with smaller ones, as where padding has id 0.
    first = jnp.minimum(query_ids[..., :1].astype(jnp.uint32), key_ids[..., :1].astype(jnp.uint32))
    queries, keys = (
        jnp.where(ids < 0, _PADDING, (ids.astype(jnp.uint32) - first) & _IDS) for ids in (query_ids, key_ids)
    )
    ordered = _is_sorted(queries) & _is_sorted(keys)

    offset = key_len - query_len if spec.bottom_right else jnp.zeros((), jnp.int32)
    by_query = _bounds(_iota(T) + offset, spec.window_left, spec.window_right, key_len)
    by_key = _bounds(_iota(S) - offset, spec.window_right, spec.window_left, query_len)
    return (
        _rows(queries, keys, by_query, S, ordered, aligned),
        _rows(keys, queries, by_key, T, ordered, aligned),
        ordered,
    )


def _bounds(middle: Any, left: int, right: int, length: Any) -> tuple[Any, Any]:
    """What windows and lengths leave to each row: ends that never decrease."""
    begin = jnp.zeros_like(middle) if left < 0 else middle - np.int32(left)
    end = jnp.full_like(middle, _MANY) if right < 0 else middle + np.int32(right + 1)
    return jnp.clip(begin, 0, length), jnp.clip(end, 0, length)


def _rows(ids: Any, others: Any, bounds: tuple[Any, Any], count: Any, ordered: Any, aligned: bool) -> _Rows:
    begin, end = bounds
    padding = ids == _PADDING
    ends = jnp.where(padding[..., None], _PADDING, ids[..., None] + jnp.arange(2, dtype=jnp.uint32))
    found = _search.count_below(lambda at: _take(others, at) < ends[..., None], ends, count)
    exact_begin, exact_end = jnp.maximum(found[..., 0], begin), jnp.minimum(found[..., 1], end)
    meets = ~padding if aligned else ~padding & _meets(ids, others, begin, end, count)
    ordered = ordered[..., None]
    return _Rows(
        jnp.where(ordered, exact_begin, begin),
        jnp.where(ordered, exact_end, end),
        jnp.where(ordered, exact_begin < exact_end, meets),
    )


def _meets(ids: Any, others: Any, begin: Any, end: Any, count: Any) -> Any:
    """Whether a row's id is among the others' in [begin, end): of those that have it, the first from begin on tells."""
    places = jnp.zeros_like(others, jnp.int32) + _iota(count)  # split over a mesh, and varying, as the others
    others, places = lax.sort((others, places), num_keys=1, is_stable=True)

    def below(at: Any) -> Any:
        other, id_ = _take(others, at), ids[..., None]
        return (other < id_) | ((other == id_) & (_take(places, at) < begin[..., None]))

    at = _search.count_below(below, jnp.broadcast_arrays(ids, begin)[0], count)
    last = jnp.minimum(at, jnp.asarray(count, jnp.int32) - 1)
    return (at == last) & (_take(others, last) == ids) & (_take(places, last) < end)


def _take(x: Any, at: Any) -> Any:
    """x[..., at] of x [*#B, n] for at [*#B, ..]."""
    batch = x.ndim - 1
    x, flat = _compat.match_varying([x, at.reshape(*at.shape[:batch], -1)])
    flat = jnp.take_along_axis(x, flat, axis=-1, mode="promise_in_bounds")
    return flat.reshape(*flat.shape[:batch], *at.shape[batch:])


def _is_sorted(x: Any) -> Any:
    return jnp.all(x[..., 1:] >= x[..., :-1], -1)


# From pairs: what each row keeps first and last, and how much in between.


def _from_sides(sides: Any, heads: Any, T: Any, S: Any) -> tuple[_Rows, _Rows, Any]:
    """sides: of queries and of keys the first, the end, and how much there is in all heads together, [*#B, rows]."""
    sizes = (S, T)
    # Ends that never decrease, and a row that reads nothing between those beside it. Begins run from the last row on.
    ends = [jnp.stack([end, _MANY - jnp.flip(first, -1)]) for first, end, _ in sides]
    if isinstance(T, int) and isinstance(S, int) and T == S:
        both = _running_maximum(jnp.stack(ends))
        ends = [both[0], both[1]]
    else:
        ends = [_running_maximum(x) for x in ends]
    rows, exact = [], []
    for (_, _, kept), x, size in zip(sides, ends, sizes, strict=True):
        begin, end = jnp.minimum(jnp.flip(_MANY - x[1], -1), jnp.asarray(size, jnp.int32)), x[0]
        rows.append(_Rows(begin, end, kept > 0))
        exact.append(jnp.all((kept == 0) | ((end - begin) * heads == kept), -1))
    return rows[0], rows[1], exact[0] & exact[1]


def _extents(mask: Any) -> Any:
    *batch, _, T, S = mask.shape
    results = [_compat.aval_like(jax.typeof(mask), (*batch, 3, n), jnp.int32) for n in (T, S)]
    by_query, by_key = ffi.ffi_call(EXTENTS_TARGET, results)(mask)
    return [
        (jnp.where(x[..., 2, :] > 0, np.int32(n) - x[..., 0, :], _MANY), x[..., 1, :], x[..., 2, :])
        for x, n in ((by_query, S), (by_key, T))
    ]


def _reduced(keep: Any, axis: int) -> Any:
    """Of what any head reads along the axis: the first, the end, and how much there is in all heads together."""
    place = lax.broadcasted_iota(jnp.int32, keep.shape, axis)
    each = jnp.where(keep, place, _MANY), jnp.where(keep, place + 1, 0), keep.astype(jnp.int32)
    nothing = _compat.match_varying([keep, *map(jnp.asarray, (_MANY, np.int32(0), np.int32(0)))])[1:]
    return lax.reduce(_compat.match_varying(each), nothing, _join, (axis, keep.ndim - 3))


def _join(a: Any, b: Any) -> Any:
    return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), a[2] + b[2]


def _running_maximum(x: Any) -> Any:
    """Along the last axis, of numbers that are not negative: of each block up to the place, and of the blocks before.
    (XLA would take a tree of three times as many kernels.)"""
    *batch, count = x.shape
    if not isinstance(count, int):
        return lax.cummax(x, x.ndim - 1)
    width = 1 << ((count - 1).bit_length() + 1) // 2
    x = jnp.pad(x, [*[(0, 0)] * len(batch), (0, -count % width)])
    blocks = x.reshape(*batch, -1, width)

    def maximum(x: Any, upto: Any) -> Any:
        place = _iota(x.shape[-1])
        return jnp.max(jnp.where(upto(place[:, None], place), x[..., None, :], 0), -1)

    inside = maximum(blocks, jnp.greater_equal)
    before = maximum(jnp.max(blocks, -1), jnp.greater)
    return jnp.maximum(inside, before[..., None]).reshape(*batch, -1)[..., :count]
