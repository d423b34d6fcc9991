"""Packed sequences row by row: the operands key_spans, query_spans, span_flags and positions of src/core/spec.h.

In O(T + S) work and memory whatever the masks hold: in jax.numpy, or, on one GPU, by one kernel (src/cuda/packs.cu),
which is what a call of short sequences would wait for else. Knows no keyword of the public API.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import ffi
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_flash2 import _compat, _mask, _search
from jax_flash2._checks import Packing
from jax_flash2._spec import MAX_LENGTH

PACKS_TARGET = "jax_flash2_packs_v1"

_MOST_SEQUENCES = 1023  # kMostSequences of src/cuda/packs.h

packed_rows_p = Primitive("packed_rows")


@functools.partial(jax.jit, static_argnames=("queries", "keys", "window", "bottom_right"))
def packed(
    packing: Packing, *, queries: Any, keys: Any, window: tuple[int | None, int | None], bottom_right: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(key_spans [queries, 2], query_spans [keys, 2], span_flags [], positions [queries]) of sequences that lie one
    behind the other.

    window: (left, right), None for an open side.
    """
    names = tuple(name for name, x in packing._asdict().items() if x is not None)
    before, after = (MAX_LENGTH if side is None else side for side in window)
    params = {"queries": queries, "keys": keys, "before": before, "after": after, "bottom_right": bottom_right}
    xs = _compat.match_varying([x for x in packing if x is not None])
    return tuple(packed_rows_p.bind(*xs, names=names, **params))  # type: ignore[no-untyped-call]


@functools.partial(jax.jit, static_argnames=("queries", "keys"))
def in_sequence(packing: Packing, queries: Any, keys: Any) -> jax.Array:
    """bool [queries]: whether a query is a used one of a sequence."""
    sequences = packing.sequences(queries, keys)
    starts = sequences.query_starts
    b = _sequence(starts, queries)
    index = jnp.arange(queries, dtype=jnp.int32) - starts[b]
    return (index >= 0) & (index < sequences.query_lengths[b])


# The primitive: each array may have the same number of leading axes, which are its own or of size 1.


def _abstract(*avals: Any, queries: Any, keys: Any, **_: Any) -> list[Any]:
    split = next((x for x in avals if any(_compat.sharding_spec(x))), avals[0])  # knows the mesh
    batch, spec = [], []
    for axis in range(avals[0].ndim - 1):
        full = next((x for x in avals if x.shape[axis] != 1), avals[0])
        batch.append(full.shape[axis])
        spec.append(_compat.sharding_spec(full)[axis])
    return [
        _compat.aval_like(split, (*batch, *shape), jnp.int32, (*spec, *[None] * len(shape)))
        for shape in ((queries, 2), (keys, 2), (), (queries,))
    ]


def _batch(xs: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    xs = [jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(xs, dims, strict=True)]
    outs = packed_rows_p.bind(*xs, **params)  # type: ignore[no-untyped-call]
    return outs, [0] * len(outs)


def _rows(*xs: Any, names: Sequence[str], **params: Any) -> Any:
    """In jax.numpy."""
    if xs[0].ndim == 1:
        given = dict(zip(names, xs, strict=True))
        return _rows_of_pack(Packing._make(given.get(name) for name in Packing._fields), **params)
    shared = [x.shape[0] == 1 for x in xs]
    in_axes = [None if one and not all(shared) else 0 for one in shared]
    xs = tuple(x[0] if axis is None else x for x, axis in zip(xs, in_axes, strict=True))
    return jax.vmap(functools.partial(_rows, names=names, **params), in_axes)(*xs)


def _lower_cuda(ctx: Any, *values: Any, names: Sequence[str], **params: Any) -> Any:
    sizes = [*(size for x in ctx.avals_in for size in x.shape), params["queries"], params["keys"]]
    known = all(isinstance(size, int) for size in sizes) and ctx.avals_in[0].shape[-1] <= _MOST_SEQUENCES + 1
    if not known or _compat.automatic_devices(ctx) > 1:  # XLA cannot split the kernel's packs over devices
        return mlir.lower_fun(functools.partial(_rows, names=names, **params))(ctx, *values)

    def call(*xs: Any) -> Any:
        batch = jnp.broadcast_shapes(*(x.shape[:-1] for x in xs))
        given = {name: jnp.broadcast_to(x, (*batch, x.shape[-1])) for name, x in zip(names, xs, strict=True)}
        absent = jnp.zeros((0,), jnp.int32)
        arrays = [given.get(name, absent) for name in Packing._fields]
        numbers = {name: np.int64(params[name]) for name in ("before", "after")}
        find: Any = ffi.ffi_call(PACKS_TARGET, ctx.avals_out)
        return find(*arrays, bottom_right=params["bottom_right"], **numbers)

    return mlir.lower_fun(call)(ctx, *values)


packed_rows_p.multiple_results = True
_compat.run_eagerly(packed_rows_p)
packed_rows_p.def_abstract_eval(_abstract)  # type: ignore[no-untyped-call]
batching.primitive_batchers[packed_rows_p] = _batch
mlir.register_lowering(packed_rows_p, mlir.lower_fun(_rows))
mlir.register_lowering(packed_rows_p, _lower_cuda, platform="cuda")


# In jax.numpy.


def _rows_of_pack(packing: Packing, *, queries: Any, keys: Any, before: int, after: int, bottom_right: bool) -> Any:
    query_starts, key_starts, query_lengths, key_lengths = packing.sequences(queries, keys)
    shift = key_lengths - query_lengths if bottom_right else jnp.zeros_like(key_lengths)
    mine, other = (query_starts, query_lengths), (key_starts, key_lengths)
    key_spans, positions = _packed_side(*mine, *other, shift, queries, before, after)
    query_spans, _ = _packed_side(*other, *mine, -shift, keys, after, before)
    alive = _are_alive(*mine, key_lengths, shift, queries, before, after)
    alive &= _are_alive(*other, query_lengths, -shift, keys, after, before)
    return key_spans, query_spans, _mask.span_flags(True, _all(alive)), positions


def _packed_side(
    starts: Any, lengths: Any, other_starts: Any, other_lengths: Any, shift: Any, size: Any, before: int, after: int
) -> tuple[jax.Array, jax.Array]:
    """The span of each row of one side, [size, 2], and where the row stands on the other, [size].

    Rows in no sequence have an empty span between those of their neighbours, so that neither end ever decreases.
    """
    b = _sequence(starts, size)
    of_each = (starts[:-1], lengths, other_starts[:-1], other_lengths, shift)
    # Added zeros, which XLA removes, map each where starts are mapped: of an array that is not JAX takes no elements by
    # indices that a mesh splits.
    start, length, low, others, shift = ((x + 0 * starts[:-1]).at[b].get(mode="promise_in_bounds") for x in of_each)
    index, high = jnp.arange(size, dtype=jnp.int32) - start, low + others
    position = low + index + shift
    begin, end = jnp.clip(position - before, low, high), jnp.clip(position + after + 1, low, high)
    inside = (index >= 0) & (index < length)
    nearest = jnp.where(index < 0, low, high)
    begin, end = jnp.where(inside, begin, nearest), jnp.where(inside, end, nearest)
    return _mask.spans(begin, end, begin < end), position


def _are_alive(starts: Any, lengths: Any, others: Any, shift: Any, size: Any, before: int, after: int) -> Any:
    """bool [B]: whether each row of a sequence reads something, and none lies behind it, or before the first."""
    first, last = shift, shift + lengths - 1
    reads = (lengths == 0) | ((others > 0) & (first + after >= 0) & (last - before < others))
    return reads & (starts[1:] - starts[:-1] == lengths) & (starts[0] == 0) & (starts[-1] == size)


def _all(x: Any) -> Any:
    """By halves, as XLA makes a kernel of its own of each reduction."""
    count: Any = x.shape[0]
    if not isinstance(count, int):
        return jnp.all(x)
    while count > 1:
        half = (count + 1) // 2
        x, count = x[:half] & x[count - half :], half
    return x[0]


def _sequence(starts: jax.Array, size: Any) -> jax.Array:
    """[size]: the sequence that a row lies in, or the one before or behind it."""
    count, row = starts.shape[0], jnp.arange(size, dtype=jnp.int32)

    def is_reached(at: Any) -> Any:
        return starts.at[at].get(mode="promise_in_bounds") <= row[:, None]

    # XLA's for CPUs keeps all that nodes compare which are wider.
    reached = _search.count_below(is_reached, row, count, most_bits=5)
    return jnp.clip(reached - 1, 0, count - 2)
