"""Who sees whom by bounds and spans, in jax.numpy: the law of src/core/mask.h. Knows no operand that removes pairs."""

from typing import Any

import jax
from jax import numpy as jnp

from jax_flash2._spec import AttentionSpec


def length(lengths: Any, full: Any, axes: int) -> jax.Array:
    """int32 [*#B, 1 ..]: clamped lengths with so many axes behind them, or the full length where there are none."""
    if lengths is None:
        return jnp.asarray(full, jnp.int32)
    return jnp.clip(lengths, 0, full)[(..., *[None] * axes)]


def visible(i: jax.Array, j: jax.Array, query_len: jax.Array, key_len: jax.Array, spec: AttentionSpec) -> jax.Array:
    """bool, broadcast: whether query i sees key j."""
    position = i + (key_len - query_len) if spec.bottom_right else i
    seen: jax.Array = (i < query_len) & (j < key_len)
    if spec.window_left >= 0:
        seen = seen & (j >= position - spec.window_left)
    if spec.window_right >= 0:
        seen = seen & (j <= position + spec.window_right)
    return seen


def spans(begin: Any, end: Any, alive: Any) -> jax.Array:
    """[.., 2]: the span of each row, as src/core/spec.h has it. alive: whether the row takes part at all."""
    first, end = jnp.broadcast_arrays(jnp.where(alive, begin, ~begin), end)
    is_first = jnp.arange(2) == 0
    return jnp.where(is_first, first[..., None], end[..., None])  # not a stack, of which XLA makes a kernel of its own


def span_flags(exact: Any, alive: Any) -> jax.Array:
    """int32: what src/core/spec.h says of the spans of both sides. exact: no operand removes what they leave; alive:
    each row, and each key, takes part."""
    return jnp.asarray(exact).astype(jnp.int32) + 2 * jnp.asarray(alive).astype(jnp.int32)


def in_spans(j: jax.Array, of_rows: jax.Array) -> jax.Array:
    """bool, broadcast: whether the span of each row, [.., 2], has key j."""
    first, end = of_rows[..., :1], of_rows[..., 1:]
    return (first >= 0) & (first <= j) & (j < end)
