"""How many of sorted entries lie below something, for many at once, in few kernels of XLA's. Knows no attention."""

from typing import Any

import numpy as np
from jax import numpy as jnp

from jax_flash2._spec import MAX_LENGTH


def count_below(is_below: Any, like: Any, count: Any, most_bits: int = 7) -> Any:
    """int32, of like's shape: for how many of `count` sorted entries `is_below` holds, which is given [.., entries].

    A search in a tree of few levels and wide nodes: XLA makes a kernel of each level, and one of few loads lasts no
    shorter than one of many. most_bits: of a node's width.
    """
    bits = (count - 1).bit_length() if isinstance(count, int) else MAX_LENGTH.bit_length() - 1
    levels = max(1, -(-bits // most_bits))
    width = -(-bits // levels)
    at = jnp.zeros_like(like, jnp.int32)
    for level in reversed(range(levels)):
        stride = 1 << width * level
        top = count // stride if isinstance(count, int) else 1 << (bits - width * level)
        children = top if level == levels - 1 else (1 << width) - 1
        probe = at[..., None] + jnp.arange(1, children + 1, dtype=jnp.int32) * np.int32(stride)
        size = jnp.asarray(count, jnp.int32)
        below = (probe <= size) & is_below(jnp.minimum(probe, size) - 1)
        at = at + jnp.sum(below, -1, dtype=jnp.int32) * np.int32(stride)
    return at
