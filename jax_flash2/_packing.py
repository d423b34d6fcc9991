"""Packed sequences row by row: the operands key_spans, query_spans, span_flags and positions of src/core/spec.h.

Made in jax.numpy, in O(T + S) work and memory whatever the masks hold. Knows no keyword of the public API, no kernel.
"""

import functools
from typing import Any

import jax
from jax import numpy as jnp

from jax_flash2 import _mask, _search
from jax_flash2._spec import MAX_LENGTH


@functools.partial(jax.jit, static_argnames=("queries", "keys", "window", "bottom_right"))
def packed(
    packing: tuple[jax.Array, ...],
    *,
    queries: Any,
    keys: Any,
    window: tuple[int | None, int | None],
    bottom_right: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(key_spans [queries, 2], query_spans [keys, 2], span_flags [], positions [queries]) of sequences that lie one
    behind the other.

    packing: query_starts and key_starts [B + 1], B > 0, in [0, queries | keys] and never decreasing; query_lengths and
    key_lengths [B], which end before the next start. window: (left, right), None for an open side.
    """
    query_starts, key_starts, query_lengths, key_lengths = packing
    shift = key_lengths - query_lengths if bottom_right else jnp.zeros_like(key_lengths)
    before, after = (MAX_LENGTH if side is None else side for side in window)
    mine, other = (query_starts, query_lengths), (key_starts, key_lengths)
    key_spans, positions = _packed_side(*mine, *other, shift, queries, before, after)
    query_spans, _ = _packed_side(*other, *mine, -shift, keys, after, before)
    alive = _are_alive(*mine, key_lengths, shift, queries, before, after)
    alive &= _are_alive(*other, query_lengths, -shift, keys, after, before)
    return key_spans, query_spans, _mask.span_flags(True, _all(alive)), positions


@functools.partial(jax.jit, static_argnames="queries")
def in_sequence(packing: tuple[jax.Array, ...], queries: Any) -> jax.Array:
    """bool [queries]: whether a query is a used one of a sequence."""
    query_starts, _, query_lengths, _ = packing
    b = _sequence(query_starts, queries)
    index = jnp.arange(queries, dtype=jnp.int32) - query_starts[b]
    return (index >= 0) & (index < query_lengths[b])


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
