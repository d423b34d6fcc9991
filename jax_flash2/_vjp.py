"""Attention with its gradient rule, on canonical inputs. Knows no keyword of the public API and no handler.

The forward rule binds the primitive itself, never the decorated function, so that what JAX sees under a gradient is one
forward and one backward primitive, and the rules of those two serve higher derivatives.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from jax_flash2 import _compat, _ffi
from jax_flash2._checkpoint import CHECKPOINT_NAME
from jax_flash2._spec import EXTRAS, AttentionSpec, Extras


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    extras: Extras,
    spec: AttentionSpec,
    *,
    return_residual: bool,
    implementation: str | None,
    forward_mode: bool = False,
) -> Any:
    """out [*B, T, N, Dv], or (out, lse [*B, N, T]). Differentiable, through both, in query, key, value and the extras
    that have a slot.

    Shapes: query [*B, T, N, D], key [*B, S, K, D], value [*B, S, K, Dv], extras as their class says. Any batch axis may
    be 1 and is then shared. One dtype. forward_mode: for jax.jvp, which a rule for reverse mode forbids; it then has no
    reverse mode on kernels.
    """
    arrays, tree = jax.tree.flatten((query, key, value, extras))
    # Outside the rule, where JAX sees the casts and gives the gradient of what the shards share its sum.
    q, k, v, extras = jax.tree.unflatten(tree, _compat.match_varying(arrays))
    if not forward_mode:
        return _attention(spec, return_residual, implementation, q, k, v, extras)
    out, lse = _ffi.forward(q, k, v, extras, spec, implementation)
    return (out, lse) if return_residual else out


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    spec: AttentionSpec, return_residual: bool, implementation: str | None, q: Any, k: Any, v: Any, extras: Extras
) -> Any:
    out, lse = _ffi.forward(q, k, v, extras, spec, implementation)
    return (out, lse) if return_residual else out


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Fixed:
    """Extras that are not differentiated in, so that nothing is computed for them. Of a bias that is T x S numbers."""

    names: tuple[str, ...]


def _forward(spec: AttentionSpec, return_residual: bool, implementation: str | None, *primals: Any) -> tuple[Any, Any]:
    q, k, v, extras = custom_vjp_primal_tree_values(primals)  # type: ignore[no-untyped-call]
    slots = zip(Extras._fields, EXTRAS, primals[-1], strict=True)
    fixed = _Fixed(tuple(name for name, kind, x in slots if kind.slot != "-" and x is not None and not x.perturbed))
    out, lse = _ffi.forward(q, k, v, extras, spec, implementation)
    out, lse = (checkpoint_name(x, CHECKPOINT_NAME) for x in (out, lse))  # type: ignore[no-untyped-call]
    return (out, lse) if return_residual else out, (q, k, v, out, lse, extras, fixed)


def _backward(
    spec: AttentionSpec, return_residual: bool, implementation: str | None, residuals: Any, cotangent: Any
) -> tuple[Any, Any, Any, Extras]:
    q, k, v, out, lse, extras, fixed = residuals
    dout, dlse = cotangent if return_residual else (cotangent, None)
    dout = jnp.zeros_like(out) if isinstance(dout, SymbolicZero) else dout
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    dq, dk, dv, slots = _ffi.backward(q, k, v, out, lse, dout, dlse, extras, fixed.names, spec, implementation)
    dextras = (
        None if slot is None else _sum_to(slot if kind.slot == "=" else _drop_axes(slot, kind.slot, kind.axes), x)
        for slot, kind, x in zip(slots, EXTRAS, extras, strict=True)
    )
    return _sum_to(dq, q), _sum_to(dk, k), _sum_to(dv, v), Extras(*dextras)


def _drop_axes(slot: Any, letters: str, kept: str) -> Any:
    """Sums a slot over the axes that its operand does not have."""
    first = slot.ndim - len(letters)
    return jnp.sum(slot, axis=tuple(first + i for i, letter in enumerate(letters) if letter not in kept))


def _sum_to(gradient: Any, operand: Any) -> Any:
    """Sums over the axes along which the operand is shared, in no less than float32; split as the operand is."""
    pairs = enumerate(zip(gradient.shape, operand.shape, strict=True))
    shared = tuple(i for i, (full, own) in pairs if own == 1 and full != 1)
    if shared:
        wide = np.promote_types(gradient.dtype, np.float32)
        gradient = jnp.sum(gradient.astype(wide), axis=shared, keepdims=True)
    return _compat.split_as(operand, gradient.astype(operand.dtype))


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
