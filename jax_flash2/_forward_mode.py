"""attention_jvp: forward mode of `attention`, which its own rule for reverse mode forbids. Knows no mathematics."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_flash2 import _checks
from jax_flash2._api import attend, attention

_NAMES = ("query", "key", "value", "scale")


def attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], **keywords: Any) -> tuple[Any, Any]:
    """`attention`, and how it moves when its operands do: what jax.jvp would give, in memory of O(T) a block of keys.

    (jax.jvp of `attention` itself raises TypeError, because JAX lets a function with a rule for reverse mode have no
    forward mode.) The forward kernel runs once; the tangents are plain jax.numpy over blocks of keys, on any device.
    The result can be differentiated again in any mode, also by jax.grad, then without the backward kernel.

    Args:
      primals: (query, key, value) or (query, key, value, scale), as `attention` takes them.
      tangents: one for each primal, of its shape and dtype, or None for one that does not move.
      keywords: those of `attention`, but scale where it is among the primals.

    Returns:
      (result, tangent): what `attention` returns, out or (out, lse), and the same for the tangents.

    Raises:
      ValueError, TypeError: wrong input, as for `attention`, or a tangent that does not fit its primal.
      NotImplementedError: as for `attention`. implementation="reference" serves every keyword, in O(T S) memory.
    """
    if len(primals) not in (3, 4) or len(tangents) != len(primals):
        raise ValueError(
            f"primals has {len(primals)} entries and tangents {len(tangents)}; each must be (query, key, value), or "
            "(query, key, value, scale)."
        )
    names = _NAMES[: len(primals)]
    if "scale" in keywords and "scale" in names:
        raise TypeError("scale is both a keyword and the fourth of primals; give it once.")
    primals = [_checks.array(name, x) for name, x in zip(names, primals, strict=True)]
    tangents = [_tangent(*xs) for xs in zip(names, primals, tangents, strict=True)]
    bound = inspect.signature(attention).bind(**dict(zip(names, primals, strict=True)), **keywords)
    bound.apply_defaults()
    given = dict(bound.arguments)
    options = {name: given.pop(name) for name in ("deterministic", "return_residual", "implementation")}

    def call(*xs: Any) -> Any:
        moved = _checks.check(**given | dict(zip(names, xs, strict=True)))
        return attend(moved, **options, forward_mode=True)

    result, tangent = jax.jvp(call, primals, tangents)
    return result, tangent


def _tangent(name: str, primal: jax.Array, tangent: Any) -> Any:
    if tangent is None:
        return jnp.zeros_like(primal)
    tangent = _checks.array(f"the tangent of {name}", tangent)
    if tangent.shape != primal.shape or tangent.dtype != np.dtype(primal.dtype):
        raise ValueError(
            f"the tangent of {name} is {tangent.dtype}{list(tangent.shape)}; it must be as {name}, "
            f"{primal.dtype}{list(primal.shape)}. Cast or reshape it, or pass None for no motion."
        )
    return tangent
