"""What attention() accepts: every argument is checked here, at trace time, and given its canonical shape and type.

Knows shapes, dtypes and ranges, and says in each error the argument, its value, the rule and the remedy. Must not know
what an option means (that is _api for the kernels and reference for the oracle) nor which kernel serves it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash2 import _compat, _options
from jax_flash2._spec import MAX_LENGTH

MAX_HEAD_DIM = 256
DTYPES = ("bfloat16", "float16", "float32", "float64")
_INT32 = np.iinfo(np.int32)


class Sequences(NamedTuple):
    """Sequences one behind the other along T and S, B > 0 of them; starts never decrease."""

    query_starts: jax.Array  # [B + 1] int32 in [0, T], the last one being the end
    key_starts: jax.Array  # [B + 1] int32 in [0, S]
    query_lengths: jax.Array  # [B] int32: how much of each is used
    key_lengths: jax.Array  # [B] int32


class Packing(NamedTuple):
    """The same as it was given: any numbers."""

    query_starts: jax.Array  # [B + 1] int32, the last one being the end
    key_starts: jax.Array | None  # [B + 1] int32; None: the same
    query_used: jax.Array | None  # [B] int32: how much of each is used; None: all
    key_used: jax.Array | None  # [B] int32

    def sequences(self, T: Any, S: Any) -> Sequences:
        """Wrong numbers become right ones, by which only rows are read that exist. src/cuda/packs.cu does the same."""

        def starts(x: jax.Array, total: Any) -> jax.Array:
            return jax.lax.cummax(jnp.clip(x, 0, total))

        def lengths(starts: jax.Array, used: jax.Array | None) -> jax.Array:
            whole = starts[1:] - starts[:-1]
            return whole if used is None else jnp.clip(used, 0, whole)

        queries = starts(self.query_starts, T)
        if self.key_starts is None:  # then lengths are equal, and no alignment matters, whatever the totals are
            queries = keys = queries if T == S else jnp.minimum(queries, starts(self.query_starts, S))
        else:
            keys = starts(self.key_starts, S)
        return Sequences(queries, keys, lengths(queries, self.query_used), lengths(keys, self.key_used))


class Call(NamedTuple):
    """The arguments of one call. `*#B`: the batch axes of query, each of its size or 1; `#` likewise for other axes."""

    query: jax.Array  # [*B, T, N, D]
    key: jax.Array  # [*B, S, K, D]
    value: jax.Array  # [*B, S, K, Dv]
    bias: jax.Array | None  # [*#B, #N, #T, #S] floating
    mask: jax.Array | None  # [*#B, #N, #T, #S] bool
    scale: float | jax.Array  # a static number, or floating [*#B]
    is_causal: bool
    bottom_right: bool  # false also where the alignment cannot matter
    window: tuple[int | None, int | None]  # (left, right)
    soft_cap: float | None
    alibi_slopes: jax.Array | None  # [*#B, #N] floating
    sinks: jax.Array | None  # [*#B, #N] floating
    query_lengths: jax.Array | None  # [*#B] int32 in [0, T]
    key_lengths: jax.Array | None  # [*#B] int32 in [0, S]
    query_ids: jax.Array | None  # [*#B, T] int32, -1: padding
    key_ids: jax.Array | None  # [*#B, S] int32, -1: padding
    dropout_rate: float
    dropout_rng: jax.Array | None
    dropout_shared: bool = False  # by all batch rows and heads
    packing: Packing | None = None  # then there are no batch axes, lengths, ids, bias and mask
    longest: int | None = None  # of the packed sequences, in keys, as far as is known


def check(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    scale: ArrayLike | None,
    is_causal: bool,
    causal_alignment: str | None,
    local_window_size: int | tuple[int | None, int | None] | None,
    logits_soft_cap: float | None,
    alibi_slopes: ArrayLike | None,
    sinks: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    query_segment_ids: ArrayLike | None,
    key_value_segment_ids: ArrayLike | None,
    dropout_rate: float,
    dropout_rng: jax.Array | None,
) -> Call:
    """Raises ValueError or TypeError for wrong input; otherwise returns it in canonical form."""
    q, k, v = array("query", query), array("key", key), array("value", value)
    _check_qkv(q, k, v)
    batch, (T, N, D), S = q.shape[:-3], q.shape[-3:], k.shape[-3]
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        missing = "key_value_segment_ids" if key_value_segment_ids is None else "query_segment_ids"
        raise ValueError(f"{missing} is None, but ids need both sides. In self-attention pass the same array twice.")

    window = _options.window(local_window_size)
    is_causal = _options.flag("is_causal", is_causal)
    positions_matter = is_causal or window != (None, None) or alibi_slopes is not None
    no_lengths = query_seq_lengths is None and key_value_seq_lengths is None
    aligned = no_lengths and isinstance(T, int) and isinstance(S, int) and T == S
    bottom_right = _options.bottom_right(causal_alignment, positions_matter and not aligned, T, S)

    rate = _options.static_float("dropout_rate", dropout_rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate is {rate}; it must be in [0, 1): the share of probabilities set to zero.")
    if rate > 0 and dropout_rng is None:
        raise ValueError(f"dropout_rate is {rate} but dropout_rng is None. Pass a jax.random key, or dropout_rate=0.")

    query_ids = _integers("query_segment_ids", query_segment_ids, batch, (("T", T),), low=-1)
    key_ids = query_ids  # one array stays one: what has the same ids on both sides is cheaper
    if key_value_segment_ids is not query_segment_ids or T != S:
        key_ids = _integers("key_value_segment_ids", key_value_segment_ids, batch, (("S", S),), low=-1)
    score_axes = (("N", N), ("T", T), ("S", S))
    return Call(
        query=q,
        key=k,
        value=v,
        bias=_operand("bias", bias, batch, score_axes, jnp.floating),
        mask=_operand("mask", mask, batch, score_axes, jnp.bool_),
        scale=1 / math.sqrt(D) if scale is None else _scale(scale, batch),
        is_causal=is_causal,
        bottom_right=bottom_right,
        window=window,
        soft_cap=_options.soft_cap(logits_soft_cap),
        alibi_slopes=_operand("alibi_slopes", alibi_slopes, batch, (("N", N),), jnp.floating),
        sinks=_operand("sinks", sinks, batch, (("N", N),), jnp.floating),
        query_lengths=_integers("query_seq_lengths", query_seq_lengths, batch, (), 0, T),
        key_lengths=_integers("key_value_seq_lengths", key_value_seq_lengths, batch, (), 0, S),
        query_ids=query_ids,
        key_ids=key_ids,
        dropout_rate=rate,
        dropout_rng=None if dropout_rng is None else _options.rng(dropout_rng),
    )


def packing(cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any) -> Packing:
    """Raises ValueError or TypeError for wrong input; does not look at the numbers."""
    numbers = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    arrays = {name: array(name, x) for name, x in numbers.items() if x is not None or name.startswith("cu")}
    for name, x in arrays.items():
        if any(split is not None for split in _compat.sharding_spec(jax.typeof(x))):
            raise NotImplementedError(
                f"{name} {jax.typeof(x).str_short()} is split over a mesh, but each device needs all of it: gather it "
                "with jax.sharding.reshard, or map over packs with jax.vmap and split that axis."
            )
    shapes = {name: x.shape for name, x in arrays.items()}
    for name, shape in shapes.items():
        if len(shape) != 1 or (name.startswith("cu") and shape[0] == 0):
            what = "[B + 1], the starts of B sequences and the end" if name.startswith("cu") else "[B], lengths"
            raise ValueError(f"{name} has shape {shape}; it must be {what}. Several packs at once: use jax.vmap.")
    B = shapes["cu_seqlens_q"][0] - 1
    for name, shape in shapes.items():
        size, letters = (B + 1, "B + 1") if name.startswith("cu") else (B, "B")
        if shape[0] != size:
            raise ValueError(
                f"{name} has shape {shape}; it must be [{letters}] = ({size},), because cu_seqlens_q has shape "
                f"({B + 1},): one number for each sequence and, in cu_seqlens alone, one for the end."
            )
    try:
        bool(B >= 1)
    except jax.errors.InconclusiveDimensionOperation as error:
        raise ValueError(
            f"cu_seqlens_q has shape ({B + 1},), which may hold no sequence; a symbolic shape must say that there is "
            "one. Call it b + 1 in jax.export.symbolic_shape, or give it the constraint 'b >= 2'."
        ) from error

    def starts(name: str) -> jax.Array:
        x: Any = _integers(name, numbers[name], (), (("B + 1", B + 1),))
        return jnp.concatenate([x, x]) if B == 0 else x  # one empty sequence, then

    def used(name: str) -> jax.Array | None:
        return None if B == 0 else _integers(name, numbers[name], (), (("B", B),))

    key_starts = None if cu_seqlens_k is cu_seqlens_q else starts("cu_seqlens_k")
    return Packing(starts("cu_seqlens_q"), key_starts, used("seqused_q"), used("seqused_k"))


def array(name: str, x: Any) -> jax.Array:
    numbers = (jax.Array, np.ndarray, np.generic, bool, int, float)
    if not isinstance(x, numbers) and not hasattr(x, "__jax_array__"):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be an array. Convert it with jax.numpy.asarray.")
    if isinstance(x, (np.ndarray, np.generic)) and not (
        jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ):
        raise TypeError(f"{name} has dtype {x.dtype}; it must be an array of numbers. Convert it with .astype.")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)  # jax 0.7 mistypes it under vmap in an Explicit mesh


def _check_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    shapes = f"query {q.shape}, key {k.shape}, value {v.shape}"
    for name, x, axes in (("query", q, "T, N, D"), ("key", k, "S, K, D"), ("value", v, "S, K, Dv")):
        if x.ndim < 3:
            raise ValueError(
                f"{name} has shape {x.shape}; it must be [..., {axes}], three axes or more. "
                f"Add the missing ones, e.g. {name}[:, None, :] for a single head."
            )
        if x.dtype.name not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {', '.join(DTYPES)}. Cast it with .astype.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"query, key and value must have one dtype, but query is {q.dtype}, key is {k.dtype} and value is "
            f"{v.dtype}. Cast them alike with .astype."
        )
    if not q.ndim == k.ndim == v.ndim or not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"query, key and value must have the same batch axes (all but the last three), but got {shapes}. "
            "Use jax.numpy.broadcast_to, or jax.vmap with in_axes=None for what is shared."
        )
    if k.shape[-3:-1] != v.shape[-3:-1]:
        raise ValueError(
            f"key and value must have the same length S and heads K, but got {shapes}: "
            f"(S, K) = {k.shape[-3:-1]} and {v.shape[-3:-1]}. The layout is [..., length, heads, head dim]."
        )
    (T, N, D), (S, K), Dv = q.shape[-3:], k.shape[-3:-1], v.shape[-1]
    if k.shape[-1] != D:
        raise ValueError(
            f"query and key must have the same head dim D, but it is {D} and {k.shape[-1]}: {shapes}. "
            "The layout is [..., length, heads, head dim]; zeros may pad the smaller one."
        )
    for what, size in (("query heads N", N), ("key/value heads K", K), ("head dim D", D), ("value head dim Dv", Dv)):
        if size == 0:
            raise ValueError(f"{what} is 0, but there must be at least one: {shapes}. The layout is [..., T, N, D].")
    if N % K != 0:
        raise ValueError(
            f"query heads must be a multiple of key/value heads, but query has N = {N} and key has K = {K}: "
            f"{shapes}. The layout is [..., T, N, D]; query head n reads key head n // (N / K)."
        )
    for what, size in (("head dim D", D), ("value head dim Dv", Dv)):
        if not isinstance(size, int):
            raise ValueError(f"{what} is the symbol {size}; it must be a number: {shapes}. Export one program a size.")
        if size > MAX_HEAD_DIM:
            raise ValueError(
                f"{what} is {size}; at most {MAX_HEAD_DIM} is supported: {shapes}. "
                "The layout is [..., T, N, D]: are the axes in this order?"
            )
    for what, length in (("query length T", T), ("key length S", S)):
        if isinstance(length, int) and length >= MAX_LENGTH:
            raise ValueError(f"{what} is {length}; it must be below {MAX_LENGTH}. Split the sequence.")


def _shaped(name: str, x: Any, batch: Sequence[int], axes: Sequence[tuple[str, int]], may_share: bool = True) -> Any:
    """x as [*#B, *axes]. Without batch axes at all it is shared by all of them, unless that could be misread."""
    given, sizes = x.shape, tuple(size for _, size in axes)
    if len(axes) < 2 and x.ndim == len(axes):
        x = x.reshape((1,) * len(batch) + x.shape)
    full = (*batch, *sizes)
    shareable = [True] * len(batch) + [may_share] * len(axes)
    fits = x.ndim == len(full) and all(
        a == b or (a == 1 and share) for a, b, share in zip(x.shape, full, shareable, strict=True)
    )
    if not fits:
        letters = ", ".join(["...", *(letter for letter, _ in axes)])
        ones = "each of which may be 1" if may_share else "where each of ... may be 1"
        raise ValueError(
            f"{name} has shape {given}; it must be [{letters}] = {full}, {ones}; ... are the {len(batch)} batch axes "
            "of query. Insert axes of size 1 to share it."
        )
    return x


def _operand(name: str, x: Any, batch: Sequence[int], axes: Sequence[tuple[str, int]], kind: Any) -> jax.Array | None:
    if x is None:
        return None
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, kind):
        if kind is jnp.bool_:
            rule = "bool, True where a key takes part. Use .astype(bool), or pass an additive mask as bias"
        else:
            rule = "floating. Cast it with .astype"
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {rule}.")
    return _shaped(name, x, batch, axes)  # type: ignore[no-any-return]


def _integers(
    name: str,
    x: Any,
    batch: Sequence[int],
    axes: Sequence[tuple[str, int]],
    low: int = _INT32.min,
    high: int = _INT32.max,
) -> jax.Array | None:
    """Integers of any width as int32 in [low, high]."""
    if x is None:
        return None
    # NumPy arrays stay NumPy's until they are clamped: JAX would cut int64 to int32 without asking.
    if isinstance(x, int) and not isinstance(x, bool):
        x = min(max(x, -1), MAX_LENGTH)
    x = np.asarray(x) if isinstance(x, (int, np.ndarray, np.generic)) else array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype}; it must be an integer dtype. Cast it, e.g. .astype('int32').")
    x = _shaped(name, x, batch, axes, may_share=False)
    if x.dtype.itemsize < 4:
        x = x.astype(np.int32)
    # Clamped in its own dtype, because the cast to int32 wraps.
    low = max(low, int(np.iinfo(x.dtype).min))
    if isinstance(x, np.ndarray) and isinstance(high, int):
        return jnp.asarray(np.clip(x, low, high).astype(np.int32))
    if isinstance(x, np.ndarray):  # high is symbolic, and below MAX_LENGTH
        x = np.clip(x, low, MAX_LENGTH).astype(np.int32)
    result: jax.Array = jnp.asarray(x)
    if result.dtype != jnp.int32 or (low, high) != (_INT32.min, _INT32.max):  # else XLA would make a kernel of nothing
        result = jnp.clip(result, *(jnp.asarray(bound, dtype=result.dtype) for bound in (low, high)))
    return result.astype(jnp.int32)


def _scale(x: Any, batch: Sequence[int]) -> float | jax.Array:
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, (jax.Array, np.ndarray)) or hasattr(x, "__jax_array__"):
        return _operand("scale", x, batch, (), jnp.floating)  # type: ignore[return-value]
    value = _options.static_float("scale", x)
    if not abs(value) <= _options.LARGEST:
        raise ValueError(f"scale is {value}; it must be finite, within +-{_options.LARGEST:g}. None means 1 / sqrt(D).")
    return value
