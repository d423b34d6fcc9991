"""What vmap does to the two primitives.

A vmapped axis becomes one more batch axis, of size 1 for operands that lack it: nothing is copied, and a batch that is
split over devices stays split. Only an axis beside the heads joins them instead.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from jax_flash2 import _compat
from jax_flash2._arrays import ARRAYS, LIKE_OPERANDS, Dims, results_of
from jax_flash2._spec import Extras

_MAX_BATCH_GROUPS = 4  # kMaxBatchAxes of src/core/problem.h


def batch(primitive: Any, xs: Any, dims: Any, *, operands: tuple[str, ...], **params: Any) -> tuple[Any, Any]:
    """The batching rule of both primitives."""
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    rank = xs[0].ndim - 3 - (dims[0] is not None)
    after = _beside_heads(operands, xs, dims, rank)
    if after is not None:
        xs = [_join_heads(*args, size, rank, after) for args in zip(operands, xs, dims, strict=True)]
        outs = primitive.bind(*xs, operands=operands, **params)
        names = results_of(primitive, operands, params["fixed"])
        split = [_split_heads(name, x, size, rank, after) for name, x in zip(names, outs, strict=True)]
        return [x for x, _ in split], [d for _, d in split]
    # Where most operands have the axis already, if among the batch axes: those need no transpose.
    votes = [d for name, d in zip(operands, dims, strict=True) if d is not None and d <= rank and ARRAYS[name].axes]
    at = max(votes, key=votes.count, default=0)
    xs = [jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at) for x, d in zip(xs, dims, strict=True)]
    if primitive.name == "flash_backward":  # each instance has a gradient of its own, also of what they share
        own = {*LIKE_OPERANDS.values()} - {*params["fixed"]}
        xs = [
            jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :])) if name in own else x
            for name, x in zip(operands, xs, strict=True)
        ]
    outs = primitive.bind(*limit_batch_groups(operands, xs), operands=operands, **params)
    return outs, [at] * len(outs)


def limit_batch_groups(operands: Sequence[str], xs: Sequence[Any]) -> Sequence[Any]:
    """The handlers merge neighbouring batch axes along which the same operands are shared, and count at most so many
    after that; beyond, the operands are broadcast. It takes five nested vmaps that each leave other operands out."""
    dims = Dims(operands, xs)
    groups: list[tuple[bool, ...]] = []
    for i, full in enumerate(dims.batch):
        shared = tuple(x.shape[i] == 1 for x in xs)
        if full != 1 and groups[-1:] != [shared]:
            groups.append(shared)
    if len(groups) <= _MAX_BATCH_GROUPS:
        return xs
    return [jnp.broadcast_to(x, (*dims.batch, *x.shape[dims.rank :])) for x in xs]


def _beside_heads(operands: Sequence[str], xs: Sequence[Any], dims: Sequence[Any], rank: int) -> int | None:
    """Whether the vmapped axis can join the heads by a free reshape: 0 if it stands before them in q, k and v, 1 if
    behind (then key heads must equal query heads, or the groups would be torn), None if it cannot."""
    given = dict(zip(operands, zip(xs, dims, strict=True), strict=True))
    # One value a batch row, but this axis would no longer be one; or one a head, which would be copied.
    if any(given[name][1] is not None or "N" in ARRAYS[name].axes for name in Extras._fields if name in given):
        return None
    after, *others = (-1 if d is None else d - rank - 1 for _, d in (given[name] for name in "qkv"))
    if after not in (0, 1) or others != [after, after]:
        return None
    heads = rank + 2 - after
    if after == 1 and given["q"][0].shape[heads] != given["k"][0].shape[heads]:
        return None
    if any(split is not None for x in xs for split in _compat.sharding_spec(jax.typeof(x))):
        return None  # in an Explicit mesh the joined axis may have no type
    return int(after)


def _heads_axis(name: str, rank: int) -> int | None:
    return next((rank + i for i, letter in enumerate(ARRAYS[name].axes) if letter in "NK"), None)


def _join_heads(name: str, x: Any, dim: int | None, size: Any, rank: int, after: int) -> Any:
    heads = _heads_axis(name, rank)
    if heads is None:
        return x
    at = heads + after
    if dim is None:
        x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))
    else:
        x = jnp.moveaxis(x, dim, at)
    return x.reshape(*x.shape[:heads], x.shape[heads] * x.shape[heads + 1], *x.shape[heads + 2 :])


def _split_heads(name: str, x: Any, size: Any, rank: int, after: int) -> tuple[Any, int]:
    heads = _heads_axis(name, rank)
    assert heads is not None, name  # every result has heads
    own = x.shape[heads] // size
    pair = (own, size) if after else (size, own)
    return x.reshape(*x.shape[:heads], *pair, *x.shape[heads + 1 :]), heads + after
