"""Attention and its gradients in NumPy, head by head, in float64 or wider, by the formulas of the paper.

The truth that kernels and jax_flash2.reference are measured against: shares no line with either, nor with what prepares
their calls. In float32 it also tells what plainly done mathematics costs there. Arguments are those of
jax_flash2.attention, as NumPy arrays, and are taken to be right.
"""

import itertools
from typing import Any

import numpy as np


def attention(
    query: Any,
    key: Any,
    value: Any,
    dout: Any,
    dlse: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    causal_alignment: str | None = None,
    local_window_size: Any = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_seeds: Any = None,
    dropout_at: tuple[int, int] = (0, 0),
    real: Any = np.float64,
    p_from_lse: bool = False,
) -> dict[str, np.ndarray]:
    """out [*B, T, N, Dv], lse [*B, T, N] and the gradients of sum(out * dout) + sum(lse * dlse), by argument.

    dropout_seeds, uint32 [*B, N, 2], stands for dropout_rng; dropout_at is where query 0 and key 0 lie in what is
    dropped. `real` is what everything is computed in; with p_from_lse the gradients take the probabilities from lse,
    rounded to it, as an algorithm does that keeps nothing else.
    """
    q, k, v, dout, dlse = (np.asarray(x, real) for x in (query, key, value, dout, dlse))
    *batch, T, N, D = q.shape
    S, K, Dv = *k.shape[-3:-1], v.shape[-1]
    scale = np.asarray(D**-0.5 if scale is None else scale, real)
    extra = {"scale": scale, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    extra = {name: np.asarray(x, real) for name, x in extra.items() if x is not None}

    shapes = {"out": (*batch, T, N, Dv), "lse": (*batch, T, N)}
    arrays = {"query": q, "key": k, "value": v, **extra}
    result = {name: np.zeros(shape, real) for name, shape in shapes.items()}
    result |= {"d" + name: np.zeros_like(x) for name, x in arrays.items()}

    for b in np.ndindex(*batch):
        t = _clamped(query_seq_lengths, b, T)
        s = _clamped(key_value_seq_lengths, b, S)
        position = np.arange(T)[:, None] + (s - t if causal_alignment == "bottom_right" else 0)
        j = np.arange(S)[None, :]
        seen = (np.arange(T)[:, None] < t) & (j < s)
        if is_causal:
            seen &= j <= position
        if local_window_size is not None:
            left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
            seen &= (left is None) | (j >= position - (left or 0))
            seen &= (right is None) | (j <= position + (right or 0))
        if query_segment_ids is not None:
            ids_q, ids_k = _pick(query_segment_ids, b)[:, None], _pick(key_value_segment_ids, b)[None, :]
            seen &= (ids_q == ids_k) & (ids_q >= 0)

        for head in range(K):
            group = range(head * N // K, (head + 1) * N // K)
            keeps = {}
            for n in group:
                keeps[n] = seen.copy()
                if mask is not None:
                    keeps[n] &= np.broadcast_to(_pick(mask, b, n), (T, S))
                if bias is not None:
                    keeps[n] &= ~np.isneginf(np.broadcast_to(_pick(bias, b, n), (T, S)))
            read = np.any([keep.any(0) for keep in keeps.values()], axis=0)[:, None]
            k_head, v_head = (np.where(read, x[(*b, slice(None), head)], 0) for x in (k, v))
            for n in group:
                at = (*b, slice(None), n)
                sink = np.full(T, -np.inf, real)
                if sinks is not None:
                    sink[:t] = _pick(extra["sinks"], b, n)
                h = _head(
                    q[at],
                    k_head,
                    v_head,
                    dout[at],
                    dlse[at],
                    keeps[n],
                    sink=sink,
                    scale=_pick(scale, b),
                    cap=logits_soft_cap,
                    bias=np.broadcast_to(_pick(extra["bias"], b, n), (T, S))
                    if bias is not None
                    else np.zeros((T, S), real),
                    slope=_pick(extra["alibi_slopes"], b, n) if alibi_slopes is not None else real(0),
                    distance=np.abs(position - j).astype(real),
                    factor=_dropout(dropout_rate, dropout_seeds[(*b, n)], dropout_at, T, S, real)
                    if dropout_rate
                    else real(1),
                    p_from_lse=p_from_lse,
                )
                result["out"][at], result["lse"][at], result["dquery"][at] = h["out"], h["lse"], h["dquery"]
                result["dkey"][(*b, slice(None), head)] += h["dkey"]
                result["dvalue"][(*b, slice(None), head)] += h["dvalue"]
                _add(result["dscale"], (b,), h["dscale"])
                for name in ("bias", "alibi_slopes", "sinks"):
                    if name in extra:
                        _add(result["d" + name], (b, (n,)), h["d" + name])
    return result


def _head(q, k, v, dout, dlse, keep, *, sink, scale, cap, bias, slope, distance, factor, p_from_lse) -> dict[str, Any]:
    """One head: q [T, D], k [S, D], v [S, Dv]; every matrix is [T, S]. See appendix B of the FlashAttention paper."""
    alive = keep.any(1)
    q, dout = np.where(alive[:, None], q, 0), np.where(alive[:, None], dout, 0)
    dlse = np.where(alive | ~np.isneginf(sink), dlse, 0)  # a row with a sink has an lse, with or without keys

    dot = q @ k.T
    s = scale * dot
    slope_of_cap = np.ones_like(s)
    if cap is not None:
        s = cap * np.tanh(s / cap)
        slope_of_cap = 1 - (s / cap) ** 2
    s = s + np.where(keep, bias, 0) - slope * distance
    s = np.where(keep, s, -np.inf)

    top = np.maximum(s.max(1, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), 0, top)
    e = np.exp(s - top[:, None])
    total = e.sum(1) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    total = np.where(total == 0, 1, total)[:, None]
    out = ((e * factor) @ v) / total

    finite = np.where(np.isneginf(lse), 0, lse)
    p = np.exp(s - finite[:, None]) if p_from_lse else e / total
    dropped = p * factor

    dp = (dout @ v.T) * factor
    delta = (dout * out).sum(1)
    ds = p * (dp - delta[:, None] + dlse[:, None])
    ddot = ds * slope_of_cap
    return {
        "out": out,
        "lse": lse,
        "dquery": scale * ddot @ k,
        "dkey": scale * ddot.T @ q,
        "dvalue": dropped.T @ dout,
        "dscale": (ddot * dot).sum(),
        "dbias": ds,
        "dalibi_slopes": -(ds * distance).sum(),
        "dsinks": (np.where(np.isneginf(sink), 0, np.exp(sink - finite)) * (dlse - delta)).sum(),
    }


def _clamped(lengths: Any, b: tuple[int, ...], full: int) -> int:
    return full if lengths is None else min(max(int(_pick(lengths, b)), 0), full)


def _pick(x: Any, b: tuple[int, ...], *more: int) -> np.ndarray:
    """x[b][more]: an axis of size 1 is shared, and an array without batch axes has none to index."""
    x = np.asarray(x)
    index = (*b, *more)
    if x.ndim == len(more):
        index = more
    elif x.ndim == 0:
        index = ()
    return x[tuple(0 if size == 1 else i for i, size in zip(index, x.shape, strict=False))]


def _add(total: np.ndarray, where: tuple[tuple[int, ...], ...], x: Any) -> None:
    """total[where] += x, summed over the axes that total shares; if it has no batch axes, their index is left out."""
    index = tuple(itertools.chain(*where))
    if total.ndim < len(index):
        index = index[len(where[0]) :] if total.ndim else ()
    index = tuple(0 if size == 1 else i for i, size in zip(index, total.shape, strict=False))
    part = total[index]
    x = np.asarray(x)
    shared = tuple(i for i, size in enumerate(part.shape) if size == 1)
    total[index] = part + (x.sum(shared, keepdims=True) if shared else x)


def _dropout(rate: float, seed: Any, first: tuple[int, int], T: int, S: int, real: Any) -> np.ndarray:
    """What each probability is multiplied by: element by element, from the definition."""
    factor = np.zeros((T, S), real)
    for at in np.ndindex(T, S):
        i, j = (int(x + y) for x, y in zip(at, first, strict=True))
        block = philox4x32_7((i & ~8, j & ~8, 0, 0), (int(seed[0]), int(seed[1])))
        word = block[(2 if i & 8 else 0) + (1 if j & 8 else 0)]
        factor[at] = 1 / (1 - rate) if word >= round(rate * 2**32) else 0
    return factor


def philox4x32_7(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32 with seven rounds, in Python's integers."""
    word = 2**32 - 1
    c, (k0, k1) = counter, key
    for _ in range(7):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((p1 >> 32) ^ c[1] ^ k0, p1 & word, (p0 >> 32) ^ c[3] ^ k1, p0 & word)
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c
