"""Which queries read a key at all, and which keys a query reads at all, where operands remove pairs one by one.

What is dead may hold NaN, and 0 times NaN is NaN in a matrix product: the CUDA kernels, which know what all heads have
in common (lengths, windows, spans), are given zeros for what a bias, or a mask for each head, leaves dead. Two
reductions that XLA fuses: nothing of size T x S is kept.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from jax_flash2 import _mask
from jax_flash2._arrays import Dims
from jax_flash2._spec import AttentionSpec


def cleared(operands: Sequence[str], xs: Sequence[Any], spec: AttentionSpec) -> list[Any]:
    """The operands with zeros for what nobody reads and what reads nothing."""
    dims = Dims(operands, xs)
    keep = pairs(dict(zip(operands, xs, strict=True)), dims, spec)
    reads = jnp.swapaxes(jnp.any(keep, -1), -1, -2)[..., None]  # [*#B, T, #N, 1]
    K = dims.sizes["K"]
    heads = jnp.broadcast_to(keep, (*keep.shape[:-3], dims.sizes["N"], *keep.shape[-2:]))
    is_read = jnp.any(heads.reshape(*keep.shape[:-3], K, dims.sizes["N"] // K, *keep.shape[-2:]), (-3, -2))
    is_read = jnp.swapaxes(is_read, -1, -2)[..., None]  # [*#B, S, K, 1]

    def clear(name: str, x: Any) -> Any:
        if name in ("q", "dout"):
            return jnp.where(reads, x, jnp.zeros((), x.dtype))
        if name in ("k", "v"):
            return jnp.where(is_read, x, jnp.zeros((), x.dtype))
        return x

    return [clear(name, x) for name, x in zip(operands, xs, strict=True)]


def pairs(x: dict[str, Any], dims: Dims, spec: AttentionSpec) -> jax.Array:
    """[*#B, #N, T, S]: whether a query reads a key."""
    T, S = dims.sizes["T"], dims.sizes["S"]
    i, j = jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)
    query_len, key_len = _mask.length(x.get("query_lens"), T, 3), _mask.length(x.get("key_lens"), S, 3)
    keep = _mask.visible(i, j, query_len, key_len, spec)
    if "mask" in x:
        keep = keep & x["mask"]
    if "query_ids" in x:
        query_ids, key_ids = x["query_ids"][..., None, :, None], x.get("key_ids", x["query_ids"])[..., None, None, :]
        keep = keep & (query_ids == key_ids) & (query_ids >= 0)
    if "bias" in x:
        keep = keep & (x["bias"] != -jnp.inf)
    return keep
