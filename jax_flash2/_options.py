"""Options that are compiled into a program: each is checked here, alone, and given its canonical type.

Knows numbers, names and Python types; no shapes, and no array but a random key. Errors are as in _checks.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = 1e30  # of a static number: it and its inverse are ordinary float32 numbers
ALIGNMENTS = ("top_left", "bottom_right")
IMPLEMENTATIONS = (None, "cuda", "cpu", "reference")


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} is {x!r}; it must be a Python bool, because it selects the program that is compiled.")
    return bool(x)


def check_implementation(name: Any, allowed: Sequence[str | None] = IMPLEMENTATIONS) -> None:
    if not (name is None or isinstance(name, str)) or name not in allowed:
        raise ValueError(
            f"implementation is {name!r}, which names no backend; it must be one of "
            f"{', '.join(map(repr, allowed))}. None takes the best one for the device the call runs on."
        )


def static_float(name: str, x: Any) -> float:
    if isinstance(x, jax.Array):
        raise TypeError(f"{name} is a JAX array; it must be a Python float, because it is compiled into the program.")
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} is {x!r}; it must be a Python float. Convert it with float().")
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def soft_cap(x: Any) -> float | None:
    if x is None:
        return None
    cap = static_float("logits_soft_cap", x)
    if not 1 / LARGEST <= cap <= LARGEST:
        raise ValueError(
            f"logits_soft_cap is {cap}; it must be positive and finite, between {1 / LARGEST:g} and {LARGEST:g}. "
            "Use None for no cap."
        )
    return cap


def window(x: Any) -> tuple[int | None, int | None]:
    if x is None:
        return None, None
    left, right = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, x)
    for side in (left, right):
        if side is None and isinstance(x, (tuple, list)):
            continue
        if isinstance(side, (bool, np.bool_)) or not isinstance(side, (int, np.integer)):
            raise TypeError(
                f"local_window_size is {x!r}; it must be an int (both sides) or a pair (left, right) of ints, "
                "with None for an open side."
            )
        if side < 0:
            raise ValueError(
                f"local_window_size is {x!r}; a side must be 0 or more (the query's own position is always inside). "
                "Use None for an open side."
            )
    return tuple(None if side is None else operator.index(side) for side in (left, right))  # type: ignore[return-value]


def bottom_right(alignment: Any, matters: bool, T: int, S: int) -> bool:
    if alignment is not None and not (isinstance(alignment, str) and alignment in ALIGNMENTS):
        raise ValueError(f"causal_alignment is {alignment!r}; it must be 'top_left' or 'bottom_right'.")
    if alignment is None and matters:
        raise ValueError(
            f"causal_alignment is None, but with T = {T}, S = {S}, or with sequence lengths, a causal mask, window or "
            "ALiBi can start at either corner. Choose 'top_left', query i stands at key i (as jax.nn has it), or "
            "'bottom_right', the last query stands at the last key (as FlashAttention 2.1 and KV caches have it)."
        )
    return matters and bool(alignment == "bottom_right")


def rng(x: Any) -> jax.Array:
    typed = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    raw = not typed and hasattr(x, "dtype") and x.dtype == np.uint32 and x.ndim == 1
    if not raw and not (typed and x.ndim == 0):
        got = f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)
        raise TypeError(f"dropout_rng is {got}; it must be one key, as jax.random.key(seed) makes it.")
    return x if typed else jnp.asarray(x)
