"""`attention_fn` for flax.linen and flax.nnx: what their attention layers call, on the kernels of `attention`.

Knows both contracts; imports no flax, so that it is there without it. Must not know how attention is computed.
"""

from typing import Any

import jax
from jax import numpy as jnp
from jax.typing import ArrayLike

from jax_flash2 import _checks
from jax_flash2._api import attend


def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    *,
    causal_alignment: str | None = "top_left",
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    implementation: str | None = None,
) -> Any:
    """Attention as `MultiHeadDotProductAttention` (linen) and `MultiHeadAttention` (nnx) call it, in O(T) memory.

    Pass it as `attention_fn`. nnx says itself when a call is causal; linen says it by a mask only, so bind it::

        nn.MultiHeadDotProductAttention(..., attention_fn=functools.partial(attention_fn, is_causal=True))

    and call the layer without a mask, which costs less than one. Differs from flax in one point: a query that reads no
    key gives 0, not the mean of value.

    Args:
      query: [*B, T, N, D].
      key: [*B, S, K, D]; N must be a multiple of K.
      value: [*B, S, K, Dv].
      bias: floating, broadcastable to [*B, N, T, S].
      mask: bool, broadcastable to [*B, N, T, S], True where the key takes part.
      broadcast_dropout, dropout_rng, dropout_rate: as in flax. The elements that are dropped are not those of flax.
      deterministic: as in flax: no dropout. (Of `attention`'s keyword of that name its gradient has nothing.)
      dtype: query, key and value are cast to it; None: to the dtype they promote to.
      precision, force_fp32_for_softmax: met whatever they ask: products are accumulated, and the softmax is done, in
        float32 (float64 for float64).
      module, qk_attn_weights_einsum, attn_weights_value_einsum: must be None: no weights exist to be sown, and the
        products are not einsums.
      is_causal: a query reads no key after its own position.
      causal_alignment, local_window_size, logits_soft_cap, scale, query_seq_lengths, key_value_seq_lengths,
        implementation: as in `attention`, for `functools.partial`.

    Returns:
      [*B, T, N, Dv] in dtype, differentiable as `attention` is.

    Raises:
      ValueError, TypeError, NotImplementedError: as `attention`, and for what is said above.
    """
    del precision, force_fp32_for_softmax
    for name, given, instead in (
        ("module", module, "attention weights are never stored, so they cannot be sown: leave sow_weights False"),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum, "products are made by the kernels: leave it None"),
        ("attn_weights_value_einsum", attn_weights_value_einsum, "products are made by the kernels: leave it None"),
    ):
        if given is not None:
            raise NotImplementedError(f"{name} is {type(given).__name__}; {instead}, or use flax's own attention.")
    rate = 0.0 if deterministic else dropout_rate
    q, k, v = (_checks.array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    dtype = dtype or jnp.promote_types(jnp.promote_types(q.dtype, k.dtype), v.dtype)
    call = _checks.check(
        q.astype(dtype),
        k.astype(dtype),
        v.astype(dtype),
        _with_axes("bias", bias, q.ndim),
        _with_axes("mask", mask, q.ndim),
        scale=scale,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=None,
        sinks=None,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=None,
        key_value_segment_ids=None,
        dropout_rate=rate,
        dropout_rng=dropout_rng if rate > 0 else None,
    )
    call = call._replace(dropout_shared=broadcast_dropout)
    return attend(call, deterministic=False, return_residual=False, implementation=implementation)


def _with_axes(name: str, x: ArrayLike | None, ndim: int) -> jax.Array | None:
    """Flax broadcasts these, so leading axes may be missing; a mask may be of numbers."""
    if x is None:
        return None
    array = _checks.array(name, x)
    if name == "mask":
        array = array.astype(bool)
    return array.reshape((1,) * max(ndim - array.ndim, 0) + array.shape)
