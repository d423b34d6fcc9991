"""The public calls: what the keywords mean to the kernels. Checked arguments in, one kernel call out.

Must not know how a call is lowered (that is _vjp and _ffi) nor what is wrong input (that is _checks).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash2 import _checks, _options, _packing, reference
from jax_flash2._spec import MAX_LENGTH, AttentionSpec, Extras
from jax_flash2._vjp import flash_attention

_OPEN = -1  # a window side, or a span, without a bound


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    causal_alignment: str | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    r"""Exact attention, softmax(scale * query key^T) value, without a T x S matrix in memory.

    FlashAttention-2 (Dao, ICLR 2024, https://arxiv.org/abs/2307.08691, algorithms 1 and 2). Works under jit, grad,
    vmap, scan, checkpoint, pmap and shard_map. Letters: `*B` batch axes (none, one or many), `T` query length, `S` key
    length, `N` query heads, `K` key/value heads, `D` and `Dv` head dims. Query head n reads key head n // (N / K). In
    the shapes below `#` marks an axis that may be 1 and is then shared.

    With off = 0 for "top_left" and off = key length - query length of the batch row for "bottom_right"::

        s[i, j] = scale * dot(query[i], key[j])
        s       = logits_soft_cap * tanh(s / logits_soft_cap)
        s      += bias[i, j] - alibi_slopes * |i + off - j|
        j is read by i only if every given mask keeps it:
            j < key length;  i < query length;  mask[i, j];  equal segment ids that are not negative;
            causal: j <= i + off;  window: i + off - left <= j <= i + off + right
        lse[i]  = log(sum_j exp(s[i, j]) + exp(sinks))
        out[i]  = sum_j dropout(exp(s[i, j] - lse[i])) * value[j]

    A query that reads no key gets out 0 and lse -inf (with a sink: lse = sink) and adds nothing to any gradient. Keys
    that no query may read, and queries that read no key, may hold NaN. Only a true -inf in `bias` removes a key.

    Kernels serve every keyword; on CUDA not deterministic=True with the gradient of a bias that is shared along an axis
    or, in 16 bits, of alibi_slopes. What is not differentiated in costs no gradient. On CUDA float32 and float64 are
    multiplied as they are, never in TF32, and take many times as long as 16 bits.

    Args:
      query: [*B, T, N, D]; bfloat16, float16, float32 or float64. 1 <= D, Dv <= 256.
      key: [*B, S, K, D], of query's dtype; N must be a multiple of K.
      value: [*B, S, K, Dv], of query's dtype.
      bias: floating [*#B, #N, #T, #S], added to the scores. Has a gradient.
      mask: bool [*#B, #N, #T, #S], True where the key takes part. No gradient.
      scale: a number, or a floating array, traced or not: a scalar or [*#B]. Arrays are used in float32 and have a
        gradient. May be zero or negative. None: 1 / sqrt(D).
      is_causal: a query reads no key after its own position.
      causal_alignment: "top_left", query i stands at key i (as jax.nn has it), or "bottom_right", the last query stands
        at the last key (as FlashAttention >= 2.1 has it, and as a KV cache needs it). May be None only where it cannot
        matter: no causal mask, window or ALiBi, or T == S and no lengths given.
      local_window_size: how far a query reads, both ends included: one int for both sides, or (left, right) with None
        for an open side. Together with is_causal the tighter right end holds.
      logits_soft_cap: a positive number, or None.
      alibi_slopes: floating [*#B, #N] or [N]. Has a gradient.
      sinks: floating [*#B, #N] or [N], the logit of one more key, without a value, for each head. Has a gradient.
      query_seq_lengths: integers [*#B] or a scalar, clamped to [0, T]; later queries read nothing. No gradient.
      key_value_seq_lengths: integers [*#B] or a scalar, clamped to [0, S]; nobody reads later keys. No gradient.
      query_segment_ids: integers [*#B, T]; a negative id is padding. No gradient.
      key_value_segment_ids: integers [*#B, S]. No gradient.
      dropout_rate: the share of probabilities set to 0, in [0, 1); the others are divided by 1 - dropout_rate.
      dropout_rng: one jax.random key, needed where dropout_rate > 0. The same key drops the same elements on every
        device.
      deterministic: makes the backward bitwise repeatable on one kind of device. The forward always is.
      return_residual: also return lse.
      implementation: None takes the best kernel for the device the call runs on; "cuda" and "cpu" insist on one, and
        "reference" on plain jax.numpy, which needs O(T S) memory and serves every keyword on every device.

    Returns:
      out [*B, T, N, Dv] in query's dtype; with return_residual the pair (out, lse), lse being [*B, T, N], float32
      (float64 for float64), in natural units. Both are differentiable in query, key, value, bias, scale, alibi_slopes
      and sinks by reverse mode (jax.grad, jax.vjp), and these gradients again in any mode (jax.hessian, jax.grad of
      jax.grad), in O(T) memory. Forward mode of the call itself: `attention_jvp`.

    Raises:
      ValueError, TypeError: wrong input, while tracing; the message names the argument, its value, the rule and the
        remedy.
      NotImplementedError: right, but not served by the implementation that was asked for, or on this device.
    """
    call = _checks.check(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
    )
    return attend(call, deterministic, return_residual, implementation)


def attend(
    call: _checks.Call, deterministic: bool, return_residual: bool, implementation: Any, *, forward_mode: bool = False
) -> Any:
    """A checked call, on the kernels or the reference. forward_mode: see flash_attention."""
    _options.check_implementation(implementation)
    deterministic = _options.flag("deterministic", deterministic)
    return_residual = _options.flag("return_residual", return_residual)
    if implementation == "reference" or 0 in (*call.query.shape, *call.key.shape):
        out, lse = reference.attend(call)  # without a query or a key there is nothing to launch
        return (out, lse) if return_residual else out

    result = flash_attention(
        call.query,
        call.key,
        call.value,
        _extras(call),
        _spec(call, deterministic),
        return_residual=return_residual,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    if not return_residual:
        return result
    out, lse = result
    lse = jnp.swapaxes(lse, -1, -2)
    if call.packing is not None and call.sinks is not None:  # to a kernel a row in no sequence is like one without keys
        lse = jnp.where(_packing.in_sequence(call.packing, lse.shape[0], call.key.shape[-3])[:, None], lse, -jnp.inf)
    return out, lse


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` on the kernels of `attention`: same signature, shapes and top-left alignment.

    Differs in two points. A query that reads no key gives 0 (there: the mean of value, or 0 past query_seq_lengths).
    The residual is float32 (float64 for float64) and differentiable (there: of query's dtype, its gradient silently 0).

    Args:
      query: [B, T, N, D] or [T, N, D].
      key: [B, S, K, D] or [S, K, D].
      value: [B, S, K, Dv] or [S, K, Dv].
      bias: floating, broadcastable to [B, N, T, S], 4-dimensional or less.
      mask: bool, broadcastable to [B, N, T, S], 4-dimensional or less.
      scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size, return_residual: as in `attention`;
        lengths are [B].
      implementation: None, "cuda", "cpu" or "reference", as in `attention`.

    Returns:
      out, of query's shape but Dv; with return_residual the pair (out, lse), lse being [B, T, N] or [T, N].
    """
    arrays = [_checks.array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    for name, x in zip(("query", "key", "value"), arrays, strict=True):
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} has shape {x.shape}; it must be [B, length, heads, D] or [length, heads, D].")
    batched = arrays[0].ndim == 4
    q, k, v = (x if x.ndim == 4 else x[None] for x in arrays)
    bias, mask = (
        None if x is None else _four_axes(_checks.array(name, x)) for name, x in (("bias", bias), ("mask", mask))
    )
    result = attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        causal_alignment="top_left",
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        return_residual=return_residual,
        implementation=implementation,
    )
    return result if batched else jax.tree.map(lambda x: x[0], result)


def _four_axes(x: jax.Array) -> jax.Array:
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _spec(call: _checks.Call, deterministic: bool) -> AttentionSpec:
    left, right = (_OPEN if side is None else side for side in _window(call))
    bottom_right = call.bottom_right
    if call.packing is not None:
        left, right, bottom_right = _OPEN, _OPEN, False  # the spans hold all of it
    return AttentionSpec(
        scale=1.0 if isinstance(call.scale, jax.Array) else call.scale,
        softcap=call.soft_cap or 0.0,
        window_left=left,
        window_right=right,
        bottom_right=bottom_right,
        deterministic=deterministic,
        dropout_rate=call.dropout_rate,
        longest_span=_OPEN if call.longest is None else call.longest,
    )


def _window(call: _checks.Call) -> tuple[int | None, int | None]:
    """(left, right) of window and causal mask together, None for an open side."""
    left, right = (None if side is None or side >= MAX_LENGTH else side for side in call.window)
    return left, 0 if call.is_causal else right  # a window's right end is never tighter


def _extras(call: _checks.Call) -> Extras:
    real = jnp.float64 if call.query.dtype == jnp.float64 else jnp.float32
    slopes, sinks = (None if x is None else x.astype(real) for x in (call.alibi_slopes, call.sinks))
    bias, seeds = call.bias, None
    if bias is not None and bias.dtype.name not in _checks.DTYPES:
        bias = bias.astype(jnp.float32)  # the kernels read no 8-bit numbers
    if call.dropout_rate > 0:
        assert call.dropout_rng is not None, "checked"
        own = (*call.query.shape[:-3], call.query.shape[-2])  # a seed for each batch row and head
        seeds = jax.random.bits(call.dropout_rng, (*((1,) * len(own) if call.dropout_shared else own), 2), jnp.uint32)
    key_spans = query_spans = positions = flags = None
    if call.packing is not None:
        T, S, bottom_right = call.query.shape[-3], call.key.shape[-3], call.bottom_right
        rows = _packing.packed(call.packing, queries=T, keys=S, window=_window(call), bottom_right=bottom_right)
        key_spans, query_spans, flags, positions = rows
    return Extras(
        scale=call.scale.astype(jnp.float32) if isinstance(call.scale, jax.Array) else None,
        query_lens=call.query_lengths,
        key_lens=call.key_lengths,
        mask=call.mask,
        query_ids=call.query_ids,
        key_ids=None if call.key_ids is call.query_ids else call.key_ids,
        bias=bias,
        alibi_slopes=slopes,
        sinks=sinks,
        seeds=seeds,
        key_spans=key_spans,
        query_spans=query_spans,
        span_flags=flags,
        positions=None if slopes is None else positions,
    )
