"""Is an answer right? A float64 reference of one sampled (batch, key head), and the error that its dtype excuses.

Written in plain jnp over blocks of query rows, so that it needs O(T) memory and a GPU does it in milliseconds. Shares
no law with the package: a row's bounds are compared pair by pair, and what acts on scores is written out here.
"""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.cases import SOFT_CAP, Case

ROWS = 512


class Answer(NamedTuple):
    """One key head's share: out and dq [G, T, .] of its query heads, dk and dv [S, .]. The last three only backward."""

    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class Acting(NamedTuple):
    """What acts on the scores of G query heads, so that all cases but those with a bias share a program."""

    cap: jax.Array  # 0: none
    slopes: jax.Array  # [G], 0: none
    sinks: jax.Array  # [G], -inf: none
    bias: jax.Array | None  # [G, T, S]


def x64() -> contextlib.AbstractContextManager:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # before jax 0.8

    return enable_x64(True)


def _answer(q, k, v, g, bounds, ids, scale, acting, *, narrow, wide):
    """Attention and its gradient, operands rounded to `narrow` before each product, sums in `wide`."""
    left, right, offset, last_row, last_key = bounds
    scale = scale.astype(wide)

    def dot(spec, a, b):
        a, b = a.astype(narrow), b.astype(narrow)
        return jnp.einsum(spec, a, b, preferred_element_type=wide, precision="highest")

    heads, length, _ = q.shape
    whole = -(-length // ROWS) * ROWS

    def blocks(x):
        x = jnp.pad(x, ((0, 0), (0, whole - length), (0, 0)))
        return x.reshape(heads * whole // ROWS, ROWS, x.shape[-1])

    rows = jnp.tile(jnp.arange(whole), heads).reshape(-1, ROWS, 1)
    row_ids = jnp.tile(jnp.pad(ids[0], (0, whole - length)), heads).reshape(-1, ROWS, 1)
    keys = jnp.arange(k.shape[0])
    slopes, sinks = (jnp.repeat(x.astype(wide), whole // ROWS).reshape(-1, 1, 1) for x in acting[1:3])
    bias = None if acting.bias is None else blocks(acting.bias)
    capped, cap = acting.cap != 0, jnp.where(acting.cap != 0, acting.cap, 1).astype(wide)

    def step(sums, block):
        i, own, q, g, slope, sink, bias = block
        middle = i + offset
        keep = (i <= last_row) & (keys <= last_key) & (keys >= middle - left) & (keys <= middle + right)
        keep = keep & (own == ids[1])
        s = dot("id,jd->ij", q, k) * scale
        tanh = jnp.tanh(s / cap)
        s = jnp.where(capped, cap * tanh, s) - slope * jnp.abs(middle - keys)
        s = jnp.where(keep, s if bias is None else s + bias.astype(wide), -jnp.inf)
        top = jnp.maximum(jnp.max(s, axis=1, keepdims=True), sink)
        top = jnp.where(jnp.isinf(top), 0, top)
        e = jnp.where(keep, jnp.exp(s - top), 0)
        total = jnp.sum(e, axis=1, keepdims=True) + jnp.exp(sink - top)
        p = e / jnp.where(total == 0, 1, total)
        out = dot("ij,jd->id", p, v).astype(narrow)
        delta = jnp.sum(out.astype(wide) * g.astype(wide), axis=1, keepdims=True)
        ds = p * (dot("id,jd->ij", g, v) - delta) * jnp.where(capped, 1 - tanh**2, 1)
        dq = dot("ij,jd->id", ds, k) * scale
        dk, dv = sums
        return (dk + dot("ij,id->jd", ds, q) * scale, dv + dot("ij,id->jd", p, g)), (out, dq)

    zeros = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    of_rows = rows, row_ids, blocks(q), blocks(g), slopes, sinks, bias
    (dk, dv), (out, dq) = jax.lax.scan(step, zeros, of_rows)

    def joined(x):
        return x.reshape(heads, whole, -1)[:, :length]

    return tuple(x.astype(narrow) for x in (joined(out), joined(dq), dk, dv))


# Choosing the fastest product would take longer than any product does.
@functools.partial(jax.jit, static_argnames="dtype", compiler_options={"xla_gpu_autotune_level": 0})
def _exact_and_excused(q, k, v, g, bounds, ids, scale, acting, dtype):
    exact = _answer(q, k, v, g, bounds, ids, scale, acting, narrow=jnp.float64, wide=jnp.float64)
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    plain = _answer(q, k, v, g, bounds, ids, scale, acting, narrow=dtype, wide=wide)
    eps = jnp.finfo(dtype).eps
    excused = [
        2 * jnp.max(jnp.abs(p.astype(e.dtype) - e)) + 8 * float(eps) * jnp.max(jnp.abs(e))
        for p, e in zip(plain, exact, strict=True)
    ]
    return exact, jnp.stack(excused)


def padded(x: np.ndarray) -> np.ndarray:
    """With zeros behind its rows and columns, so that sizes share a program: compiling costs more than computing."""
    *_, length, width = x.shape
    rows = next((size for size in (4096, 16384) if length <= size), length)
    return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - length), (0, max(256 - width, 0))])


def _ids(case: Case, rows: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """The documents of rows and keys that zeros have padded. (Without parts the lengths may differ.)"""
    own = case.ids() if case.parts else np.zeros(0, np.int64)
    return tuple(jnp.asarray(np.pad(own, (0, size - own.size))) for size in (rows, keys))


def _acting(case: Case, inputs: dict[str, jax.Array], heads: slice, rows: int, keys: int) -> Acting:
    """What acts on the scores of these heads, for rows and keys that zeros have padded."""

    def of_heads(name: str, absent: float) -> jax.Array:
        x = np.asarray(inputs[name])[heads] if name in inputs else np.full(heads.stop - heads.start, absent)
        return jnp.asarray(x, jnp.float64)

    bias = None
    if "bias" in inputs:
        bias = jnp.pad(inputs["bias"][0, heads], ((0, 0), (0, rows - case.sq), (0, keys - case.sk)))
    cap = jnp.asarray(SOFT_CAP if case.scored == "softcap" else 0.0)
    return Acting(cap, of_heads("alibi", 0.0), of_heads("sinks", -np.inf), bias)


@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
def _exact_heads(q, k, v, g, bounds, ids, scale, acting):
    def head(q, k, v, g):
        given = q[None], k, v, g[None], bounds, ids, scale, acting
        out, dq, dk, dv = _answer(*given, narrow=jnp.float64, wide=jnp.float64)
        return out[0], dq[0], dk, dv

    return jax.vmap(jax.vmap(head))(q, k, v, g)


def exact_heads(case: Case, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """{"out", "dq", "dk", "dv"} of every head, on the device: float64 [b, heads, t, 256], zero in unused columns. Of
    cases whose scores nothing acts on."""
    if case.scored:
        raise ValueError(f"{case}: exact_heads knows nothing of {case.scored}")
    with x64():
        wide = [jnp.swapaxes(x, 1, 2).astype(jnp.float64) for x in inputs.values()]
        wide = [jnp.pad(x, [(0, 0)] * 3 + [(0, 256 - x.shape[-1])]) for x in wide]
        bounds = tuple(jnp.asarray(x) for x in (*case.bounds, case.sq - 1, case.sk - 1))
        acting = _acting(case, inputs, slice(0, 1), case.sq, case.sk)
        exact = _exact_heads(*wide, bounds, _ids(case, case.sq, case.sk), jnp.asarray(case.d**-0.5), acting)
    return dict(zip(Answer._fields, exact, strict=True))


class Check:
    """The reference for one sampled head of a case, and the verdict on an implementation's answer."""

    def __init__(self, case: Case, inputs: dict[str, jax.Array], seed: int = 0):
        group = case.h // case.hk
        rng = np.random.default_rng(seed)
        b, kv = int(rng.integers(case.b)), int(rng.integers(case.hk))
        self._at = {True: (b, slice(None), slice(kv * group, (kv + 1) * group)), False: (b, slice(None), kv)}
        arrays = []
        for name in ("query", "key", "value", "dout"):
            x = self._head(np.asarray(inputs[name]), name in ("query", "dout")).astype(np.float64)
            arrays.append(padded(x) if jax.default_backend() == "gpu" else x)
        with x64():
            bounds = tuple(jnp.asarray(x) for x in (*case.bounds, case.sq - 1, case.sk - 1))
            ids = _ids(case, arrays[0].shape[1], arrays[1].shape[0])
            acting = _acting(case, inputs, self._at[True][2], arrays[0].shape[1], arrays[1].shape[0])
            exact, excused = _exact_and_excused(
                *arrays, bounds, ids, jnp.asarray(case.d**-0.5), acting, dtype=case.dtype
            )
            sizes = ((case.sq, case.dv), (case.sq, case.d), (case.sk, case.d), (case.sk, case.dv))
            self.exact = Answer(*(np.asarray(x)[..., :t, :d] for x, (t, d) in zip(exact, sizes, strict=True)))
            self.excused = np.asarray(excused)

    def _head(self, x: np.ndarray, of_query: bool) -> np.ndarray:
        x = x[self._at[of_query]]
        return x.transpose(1, 0, 2) if of_query else x

    def fault(self, got: dict[str, np.ndarray]) -> str | None:
        """What is wrong with an answer {"out" | "dq" | "dk" | "dv": [b, t, heads, d]}, or None."""
        for name, x in got.items():
            exact, excused = getattr(self.exact, name), self.excused[Answer._fields.index(name)]
            error = np.max(np.abs(self._head(x, name in ("out", "dq")).astype(np.float64) - exact))
            if not error <= excused:  # so that NaN is a fault
                return f"wrong {name}: error {error:.3g} where the dtype excuses {excused:.3g}"
        return None
