"""Tangents of the two primitives, so that gradients can be differentiated again, in memory of O(T) a block of keys.

Plain reverse mode never comes here: it binds the primitives and nothing else. Under a second derivative JAX asks for
the tangents of each; they are those of the same mathematics written in jax.numpy, one block of keys at a time, each
block done anew wherever its scores are needed (so no T x S array outlives its block). Being plain jax.numpy, they can
be transposed, batched and differentiated on. Knows no handler and no keyword of the public API.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import ad

from jax_flash2 import _mask
from jax_flash2._arrays import Dims, results_of
from jax_flash2._spec import AttentionSpec

_BLOCK = 128  # keys
_OPERANDS = (
    *("q", "k", "v", "out", "lse", "dout", "dlse", "scale", "query_lens", "key_lens"),
    *("key_spans", "query_spans", "span_flags", "positions"),  # the last one of ALiBi, which is refused itself
)
_FIELDS = ("scale", "softcap", "window_left", "window_right", "bottom_right", "deterministic", "longest_span")


def jvp(primitive: Any, primals: Any, tangents: Any, *, operands: tuple[str, ...], **params: Any) -> tuple[Any, Any]:
    """The JVP rule of both primitives."""
    spec: AttentionSpec = params["spec"]
    _check_served(operands, spec)
    results = primitive.bind(*primals, operands=operands, **params)
    moving = [i for i, x in enumerate(tangents) if type(x) is not ad.Zero]
    still = dict(zip(operands, primals, strict=True))
    dims = Dims(operands, primals)
    out, lse = results[:2] if primitive.name == "flash_forward" else (still["out"], still["lse"])

    def plain(*xs: Any) -> dict[str, Any]:
        given = still | {operands[i]: x for i, x in zip(moving, xs, strict=True)}
        if primitive.name == "flash_forward":
            return _forward_sums(given, lse, dims, spec)
        return _backward(given, dims, spec)

    _, moved = jax.jvp(plain, [primals[i] for i in moving], [tangents[i] for i in moving])
    if primitive.name == "flash_forward":
        total = moved["total"]  # of exp(s - lse), which is 1 however its inputs move: lse moves by what it would
        moved = {"out": moved["sum"] - out.astype(total.dtype) * jnp.swapaxes(total, -1, -2)[..., None], "lse": total}
    names = results_of(primitive, operands, params["fixed"])
    return results, [
        jnp.broadcast_to(moved[name], x.shape).astype(x.dtype) for name, x in zip(names, results, strict=True)
    ]


def _check_served(operands: Sequence[str], spec: AttentionSpec) -> None:
    lacking = [name for name in operands if name not in _OPERANDS]
    lacking += [
        f"{field.name}={getattr(spec, field.name)}"
        for field in dataclasses.fields(spec)
        if field.name not in _FIELDS and getattr(spec, field.name) != field.default
    ]
    if lacking:
        raise NotImplementedError(
            f"attention with {', '.join(lacking)} has first derivatives in reverse mode alone (jax.grad, jax.vjp, "
            "jax.jacrev). implementation='reference' has all derivatives, in O(T S) memory"
        )


# The same mathematics, a block of keys at a time. In each function: q [*B, T, K, G, D], a block of k and v
# [*B, block, K, D | Dv], scores [*B, K, G, T, block]; numbers of a row [*B, K, G, T]. Batch axes may be 1.


def _forward_sums(x: dict[str, Any], lse: Any, dims: Dims, spec: AttentionSpec) -> dict[str, Any]:
    """Sums over keys: sum [*B, T, N, Dv] of exp(s - lse) v, and total [*B, N, T] of exp(s - lse)."""
    rows = _Rows(x, lse, dims, spec)

    def block(q: Any, lse: Any, scale: Any, k: Any, v: Any, start: Any) -> tuple[Any, Any]:
        keep = rows.keep(start)
        k, v = _where_read(keep, k), _where_read(keep, v)
        p = _probabilities(_cap(scale * _dot(q, k), spec), lse, keep)
        return (_einsum("...kgts,...skd->...tkgd", p, v), p.sum(-1)), ()

    (sums, total), _ = _over_blocks(block, (rows.q, rows.lse, rows.scale), x["k"], x["v"], dims)
    return {"sum": _join(sums, -3), "total": _join(total, -3)}


def _backward(x: dict[str, Any], dims: Dims, spec: AttentionSpec) -> dict[str, Any]:
    """What the backward kernel returns, from what it is given."""
    rows = _Rows(x, x["lse"], dims, spec)
    dout = _where_reads(rows.reads, _split(rows.wide(x["dout"]), dims, -2))
    out = _split(rows.wide(x["out"]), dims, -2)
    delta = jnp.moveaxis(jnp.sum(dout * out, -1), -3, -1)
    if "dlse" in x:
        delta = delta - jnp.where(rows.reads, _split(rows.wide(x["dlse"]), dims, -2), 0)

    def block(q: Any, lse: Any, scale: Any, dout: Any, delta: Any, k: Any, v: Any, start: Any) -> tuple[Any, Any]:
        keep = rows.keep(start)
        k, v = _where_read(keep, k), _where_read(keep, v)
        products = _dot(q, k)
        capped = _cap(scale * products, spec)
        p = _probabilities(capped, lse, keep)
        ds = p * (_dot(dout, v) - delta[..., None])
        if spec.softcap:
            ds = ds * (1 - (capped / spec.softcap) ** 2)
        sums = _einsum("...kgts,...skd->...tkgd", scale * ds, k), jnp.sum(ds * products, -1)
        per_key = _einsum("...kgts,...tkgd->...skd", scale * ds, q), _einsum("...kgts,...tkgd->...skd", p, dout)
        return sums, per_key

    shared = (rows.q, rows.lse, rows.scale, dout, delta)
    (dq, slot), (dk, dv) = _over_blocks(block, shared, x["k"], x["v"], dims)
    return {"dq": _join(dq, -3), "dk": dk, "dv": dv, "dscale": _join(slot, -3)}


class _Rows:
    """What every block needs of the queries, in float32 (float64 for float64), and who sees whom."""

    def __init__(self, x: dict[str, Any], lse: Any, dims: Dims, spec: AttentionSpec):
        self.dtype = dims.dtype("lse")
        self.dims, self.spec = dims, spec
        lse = _split(lse, dims, -2)
        self.reads = lse != -jnp.inf  # a row without keys may hold NaN
        self.lse = jnp.where(self.reads, lse, 0)
        self.q = _where_reads(self.reads, _split(self.wide(x["q"]), dims, -2))
        scale = x.get("scale")
        self.scale = (
            jnp.asarray(spec.scale, self.dtype) if scale is None else self.wide(scale)[..., None, None, None, None]
        )
        self._key_spans = x.get("key_spans")
        self._query_len = _mask.length(x.get("query_lens"), dims.sizes["T"], 4)
        self._key_len = _mask.length(x.get("key_lens"), dims.sizes["S"], 4)

    def wide(self, x: Any) -> Any:
        return x.astype(self.dtype)

    def keep(self, start: Any) -> Any:
        """bool [*#B, 1, 1, T, block] for the keys from `start` on."""
        T, S = self.dims.sizes["T"], self.dims.sizes["S"]
        i = jnp.arange(T, dtype=jnp.int32)[:, None]
        j = start + jnp.arange(min(_BLOCK, S), dtype=jnp.int32)
        keep = _mask.visible(i, j, self._query_len, self._key_len, self.spec)
        if self._key_spans is not None:
            keep = keep & _mask.in_spans(j, self._key_spans[..., None, None, :, :])
        return keep.reshape((1,) * max(self.dims.rank + 4 - keep.ndim, 0) + keep.shape)


def _over_blocks(block: Any, shared: Any, k: Any, v: Any, dims: Dims) -> tuple[Any, Any]:
    """`block(*shared, k, v, start) -> (sums, per key)` over the blocks of keys: sums added up, the rest joined."""
    S = dims.sizes["S"]
    size = min(_BLOCK, S)
    count = -(-S // size)
    dtype = dims.dtype("lse")

    def split(x: Any) -> Any:
        axis = x.ndim - 3
        x = jnp.pad(x.astype(dtype), [(0, count * size - S) if i == axis else (0, 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)

    keys, values = split(k), split(v)
    starts = jnp.arange(count, dtype=jnp.int32) * size
    again = jax.checkpoint(block)  # keep no block's scores
    sums, first = again(*shared, keys[0], values[0], starts[0])
    if count == 1:
        return sums, first

    def step(sums: Any, xs: Any) -> tuple[Any, Any]:
        new, per_key = again(*shared, *xs)
        return jax.tree.map(jnp.add, sums, new), per_key

    sums, others = jax.lax.scan(step, sums, (keys[1:], values[1:], starts[1:]))

    def join(a: Any, b: Any) -> Any:
        whole = jnp.moveaxis(jnp.concatenate([a[None], b]), 0, -4)  # [*B, count, size, K, D]
        return whole.reshape(*whole.shape[:-4], count * size, *whole.shape[-2:])[..., :S, :, :]

    return sums, jax.tree.map(join, first, others)


_einsum = functools.partial(jnp.einsum, precision="highest")


def _dot(rows: Any, keys: Any) -> Any:
    return _einsum("...tkgd,...skd->...kgts", rows, keys)


def _cap(s: Any, spec: AttentionSpec) -> Any:
    return spec.softcap * jnp.tanh(s / spec.softcap) if spec.softcap else s


def _probabilities(s: Any, lse: Any, keep: Any) -> Any:
    return jnp.where(keep, jnp.exp(jnp.where(keep, s - lse[..., None], 0)), 0)


def _where_read(keep: Any, x: Any) -> Any:
    """[*B, block, K, D], 0 where no query reads the key, which may hold NaN."""
    return jnp.where(jnp.any(keep, -2)[..., 0, 0, :, None, None], x, 0)


def _where_reads(reads: Any, x: Any) -> Any:
    """[*B, T, K, G, D], 0 where the query reads no key."""
    return jnp.where(jnp.moveaxis(reads, -1, -3)[..., None], x, 0)


def _split(x: Any, dims: Dims, heads: int) -> Any:
    """N -> K, G."""
    at = x.ndim + heads
    K = dims.sizes["K"]
    return x.reshape(*x.shape[:at], K, x.shape[at] // K, *x.shape[at + 1 :])


def _join(x: Any, heads: int) -> Any:
    at = x.ndim + heads
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
