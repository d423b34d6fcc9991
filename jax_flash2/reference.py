"""Attention in plain jax.numpy: what every kernel must compute, in a form that can be checked by reading it.

O(T S) memory, any platform, every keyword; gradients by JAX's own differentiation. Must not share code with the kernels
or with what prepares their calls: tests compare the two.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash2 import _checks, _options
from jax_flash2._spec import MAX_LENGTH


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
) -> Any:
    """The oracle: the same arguments, results and errors as `jax_flash2.attention`, which documents them.

    Differentiable any number of times, in both modes. Always deterministic.
    """
    return_residual = _options.flag("return_residual", return_residual)
    _options.flag("deterministic", deterministic)
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
    out, lse = attend(call)
    return (out, lse) if return_residual else out


def attend(call: _checks.Call) -> tuple[jax.Array, jax.Array]:
    """(out [*B, T, N, Dv], lse [*B, T, N]) of checked arguments. Scores are [*B, N, T, S]."""
    q, k, v = call.query, call.key, call.value
    dtype, accumulator = q.dtype, jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    group = q.shape[-2] // k.shape[-2]

    keep = _keep(call)
    # What nobody may read is zero from here on: NaN in it reaches no result, and no gradient through 0 * NaN.
    dead_query = jnp.swapaxes(~keep.any(-1), -1, -2)  # [*B, T, N]
    read_by_head = keep.any(-2)  # [*B, N, S]
    read = read_by_head.reshape(*k.shape[:-3], k.shape[-2], group, k.shape[-3]).any(-2)
    dead_key = jnp.swapaxes(~read, -1, -2)  # [*B, S, K]
    q = jnp.where(dead_query[..., None], 0, q).astype(accumulator)
    k = jnp.where(dead_key[..., None], 0, k).astype(accumulator)
    v = jnp.where(dead_key[..., None], 0, v).astype(accumulator)
    k, v = jnp.repeat(k, group, axis=-2), jnp.repeat(v, group, axis=-2)

    s = _score(call, q, k, keep)
    sink = _sink(call, accumulator)  # [*B, N, T], -inf where there is none
    m = jnp.maximum(jnp.max(jnp.where(keep, s, -jnp.inf), axis=-1, initial=-jnp.inf), sink)
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
    e = jnp.where(keep, jnp.exp(jnp.where(keep, s - m[..., None], 0)), 0)
    total = e.sum(-1) + jnp.exp(sink - m)
    nothing = total == 0  # neither a key nor a sink
    total = jnp.where(nothing, 1, total)
    lse = jnp.where(nothing, -jnp.inf, m + jnp.log(total))

    p = _rounded(_dropout(call, e), dtype)  # divided by the total after P V, as in FlashAttention
    out = jnp.einsum("...nts,...snd->...tnd", p, v, precision="highest") / jnp.swapaxes(total, -1, -2)[..., None]
    out = jnp.where(dead_query[..., None], 0, out)
    return out.astype(dtype), jnp.swapaxes(lse, -1, -2)


def _rounded(p: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """p with the precision of dtype and the gradient of p."""
    if p.dtype == dtype:
        return p
    exponent_bits, mantissa_bits = {"bfloat16": (8, 7), "float16": (5, 10)}[dtype.name]
    rounded = jax.lax.reduce_precision(p, exponent_bits, mantissa_bits)  # a cast there and back would be optimised away
    return p + jax.lax.stop_gradient(rounded - p)


def _over(x: jax.Array, axes: int) -> jax.Array:
    """x with `axes` axes of size 1 behind it."""
    return x.reshape(x.shape + (1,) * axes)


def _offset(call: _checks.Call) -> jax.Array:
    """[*#B, 1, #T, 1]: query i stands at key position i + offset."""
    if call.packing is not None:
        packing, (queries, _) = _packing_of(call), _sequences(call)
        offsets = packing.key_starts[:-1] - packing.query_starts[:-1]
        if call.bottom_right:
            offsets = offsets + packing.key_lengths - packing.query_lengths
        return jnp.where(queries < 0, 0, offsets[queries])[None, :, None]
    if not call.bottom_right:
        return jnp.zeros((1,) * call.query.ndim, jnp.int32)
    T, S = (jnp.asarray(n, dtype=jnp.int32) for n in (call.query.shape[-3], call.key.shape[-3]))
    t = T if call.query_lengths is None else call.query_lengths
    s = S if call.key_lengths is None else call.key_lengths
    return _over(s - t, 3)


def _positions(call: _checks.Call) -> tuple[jax.Array, jax.Array]:
    """i [T, 1] and j [S]."""
    T, S = call.query.shape[-3], call.key.shape[-3]
    return jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)


def _packing_of(call: _checks.Call) -> _checks.Sequences:
    assert call.packing is not None
    return call.packing.sequences(call.query.shape[-3], call.key.shape[-3])


def _sequences(call: _checks.Call) -> tuple[jax.Array, jax.Array]:
    """[T] and [S]: which packed sequence uses a query, and a key; -1 for none."""

    def of(starts: jax.Array, lengths: jax.Array, x: jax.Array) -> jax.Array:
        row = jnp.arange(x.shape[-3], dtype=jnp.int32)[:, None]
        member = (starts[:-1] <= row) & (row < starts[:-1] + lengths)  # [.., B], one of them at most
        number = jnp.arange(lengths.shape[0], dtype=jnp.int32)
        return jnp.max(jnp.where(member, number, -1), -1)

    packing = _packing_of(call)
    return (
        of(packing.query_starts, packing.query_lengths, call.query),
        of(packing.key_starts, packing.key_lengths, call.key),
    )


def _keep(call: _checks.Call) -> jax.Array:
    """[*B, N, T, S]: whether query i of head n reads key j."""
    i, j = _positions(call)
    p = i + _offset(call)
    left, right = call.window
    rules = [jnp.ones((*call.query.shape[:-3], call.query.shape[-2], i.shape[0], j.shape[0]), bool)]
    if call.query_lengths is not None:
        rules.append(i < _over(call.query_lengths, 3))
    if call.key_lengths is not None:
        rules.append(j < _over(call.key_lengths, 3))
    if call.is_causal:
        rules.append(j <= p)
    if left is not None:
        rules.append(p - j <= min(left, MAX_LENGTH))
    if right is not None:
        rules.append(j - p <= min(right, MAX_LENGTH))
    if call.mask is not None:
        rules.append(call.mask)
    if call.bias is not None:
        rules.append(call.bias != -jnp.inf)
    if call.query_ids is not None and call.key_ids is not None:
        query_ids, key_ids = call.query_ids[..., None, :, None], call.key_ids[..., None, None, :]
        rules.append((query_ids == key_ids) & (query_ids >= 0))
    if call.packing is not None:
        queries, keys = _sequences(call)
        rules.append((queries[:, None] == keys) & (keys >= 0))
    keep = rules[0]
    for rule in rules[1:]:
        keep = keep & rule
    return keep


def _score(call: _checks.Call, q: jax.Array, k: jax.Array, keep: jax.Array) -> jax.Array:
    dtype = q.dtype
    s = jnp.einsum("...tnd,...snd->...nts", q, k, precision="highest")
    s = s * (_over(call.scale.astype(dtype), 3) if isinstance(call.scale, jax.Array) else call.scale)
    if call.soft_cap is not None:
        s = call.soft_cap * jnp.tanh(s / call.soft_cap)
    if call.bias is not None:
        bias = jnp.where(keep, call.bias, 0).astype(dtype)  # -inf and NaN of removed keys stay outside
        s = s + jnp.where(bias == -jnp.inf, np.finfo(dtype).min, bias)  # a finite float64 is a number in float32 too
    if call.alibi_slopes is not None:
        i, j = _positions(call)
        distance = jnp.abs(i + _offset(call) - j).astype(dtype)
        s = s - _over(call.alibi_slopes.astype(dtype), 2) * distance
    return s


def _sink(call: _checks.Call, dtype: Any) -> jax.Array:
    """[*#B, #N, #T]: the logit of the key without a value."""
    if call.sinks is None:
        return jnp.full((1,) * (call.query.ndim - 1), -jnp.inf, dtype)
    sink = _over(call.sinks.astype(dtype), 1)
    if call.packing is not None:
        return jnp.where(_sequences(call)[0] >= 0, sink, -jnp.inf)
    if call.query_lengths is None:
        return sink
    i = jnp.arange(call.query.shape[-3], dtype=jnp.int32)
    return jnp.where(i < _over(call.query_lengths, 2), sink, -jnp.inf)


def _dropout(call: _checks.Call, p: jax.Array) -> jax.Array:
    if call.dropout_rate == 0:
        return p
    assert call.dropout_rng is not None, "checked"
    *batch_and_heads, T, S = p.shape
    own = (1,) * len(batch_and_heads) if call.dropout_shared else batch_and_heads
    seeds = jax.random.bits(call.dropout_rng, (*own, 2), jnp.uint32)
    words = dropout_words(seeds, T, S)
    threshold = round(call.dropout_rate * 2**32)
    kept = words >= jnp.uint32(threshold) if threshold < 2**32 else jnp.zeros_like(words, bool)
    return jnp.where(kept, p / (1 - call.dropout_rate), 0)


def dropout_words(seeds: jax.Array, T: int, S: int) -> jax.Array:
    """The random word of every (query i, key j), uint32 [..., T, S], from seeds uint32 [..., 2]. An element is kept
    where its word is at least round(rate * 2**32).

    One Philox4x32-7 block serves the four elements {i, i + 8} x {j, j + 8} with bit 3 of i and j clear, which are the
    ones that a thread owns both in S and in S transposed; its counter is (i, j, 0, 0) and its key the seed.
    """
    i, j = (jnp.arange(n, dtype=jnp.uint32) for n in (T, S))
    counter = ((i & ~jnp.uint32(8))[:, None], (j & ~jnp.uint32(8))[None, :], jnp.uint32(0), jnp.uint32(0))
    blocks = philox4x32_7(counter, (seeds[..., 0][..., None, None], seeds[..., 1][..., None, None]))
    low_i, low_j = (i & 8 == 0)[:, None], (j & 8 == 0)[None, :]
    return jnp.where(low_i, jnp.where(low_j, blocks[0], blocks[1]), jnp.where(low_j, blocks[2], blocks[3]))


def philox4x32_7(counter: Sequence[jax.Array], key: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Seven rounds of Philox4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011) on uint32."""
    c, (k0, k1) = tuple(counter), key
    for _ in range(7):
        high0, low0 = _multiply(0xD2511F53, c[0])
        high1, low1 = _multiply(0xCD9E8D57, c[2])
        c = (high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0)
        k0, k1 = k0 + jnp.uint32(0x9E3779B9), k1 + jnp.uint32(0xBB67AE85)
    return c


def _multiply(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low word of the 64-bit product, by 16-bit halves: uint64 exists only in x64 mode."""
    a_high, a_low = jnp.uint32(a >> 16), jnp.uint32(a & 0xFFFF)
    b_high, b_low = b >> 16, b & 0xFFFF
    middle = a_high * b_low + (a_low * b_low >> 16)  # below 2**32
    high = a_high * b_high + (middle >> 16) + ((middle & 0xFFFF) + a_low * b_high >> 16)
    return high, jnp.uint32(a) * b
