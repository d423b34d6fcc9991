"""How a call is cut over devices when XLA decides (jit over arrays that are split): along batch axes and heads.

Under jit a bare custom call is a black box: XLA gathers every operand and each device does the whole work. Here the
call is given to the partitioner with a rule (which axes of its arrays belong together) and a function that, once XLA
has chosen, says how each array must be cut for a piece to be a call of its own. Lengths and head dims stay whole: what
is split along them is gathered. Knows nothing of handlers; in a piece the primitive is bound again, on local shapes.
"""

import itertools
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)

from jax_flash2 import _compat
from jax_flash2._arrays import ARRAYS, LIKE_OPERANDS, Dims, results_of

_VERSION = version("jax_flash2")


def partitioned(primitive: Any, operands: tuple[str, ...], avals: Sequence[Any], devices: int, **params: Any) -> Any:
    """`primitive.bind` as a function of its operands, to be lowered where `devices` devices share the work."""
    dims = Dims(operands, avals)
    results = results_of(primitive, operands, params["fixed"])
    # The compiled program depends on what `partition` closes over, which the module must show: a persistent compilation
    # cache that has been told to overlook the address of `partition` has nothing else to tell two windows apart.
    label = np.frombuffer(repr((_VERSION, primitive.name, operands, sorted(params.items()))).encode(), np.uint8)

    def whole(*xs: Any) -> Any:
        return primitive.bind(*xs[:-1], operands=operands, **params)

    def partition(_: Any, args: Sequence[Any], outs: Sequence[Any]) -> Any:
        # Where the choices differ, the array that is cut into most pieces decides.
        candidates = zip((*results, *operands), (*outs, *args[:-1]), strict=True)
        cuts = [_Cut.of(name, x, dims) for name, x in candidates if ("N", True) in dims.axes(name, x.shape)]
        cut = max(cuts, key=lambda cut: cut.pieces)
        if cut.devices.size != devices:  # inside a shard_map over other axes, whose devices are not known here
            cut = cut.without({axis for name in results for axis in _summed(name, dims)})
        groups = [cut.groups(_summed(name, dims)) for name in results]

        def piece(*xs: Any) -> Any:
            outs = primitive.bind(*xs[:-1], operands=operands, **params)
            return [
                x if between is None else _compat.sum_over_groups(x, between)
                for x, between in zip(outs, groups, strict=True)
            ]

        mesh = jax.sharding.AbstractMesh((devices,), ("all",))
        return (
            mesh,
            piece,
            [cut.sharding(name, dims.shape(name), dims) for name in results],
            (
                *(cut.sharding(name, x.shape, dims) for name, x in zip(operands, avals, strict=True)),
                _compat.replicated(),
            ),
        )

    call: Any = custom_partitioning(whole)  # type: ignore[no-untyped-call]
    call.def_partition(partition, decode_shardings=False, sharding_rule=_rule(operands, results, dims))
    return lambda *xs: call(*xs, label)


def _rule(operands: Sequence[str], results: Sequence[str], dims: Dims) -> SdyShardingRule:
    """The axes that belong together. One of size 1 that is shared along a batch belongs to nothing."""
    unshared = itertools.count()
    K, G = dims.sizes["K"], dims.sizes["N"] // dims.sizes["K"]
    compound = K > 1 and G > 1
    query_heads = CompoundFactor("k", "g") if compound else "g" if K == 1 else "k"  # type: ignore[no-untyped-call]

    def factor(axis: Any, full: bool) -> Any:
        if not full:
            return f"one{next(unshared)}"  # every factor needs a name of its own
        return query_heads if axis == "N" else f"b{axis}" if isinstance(axis, int) else axis.lower()

    def mapping(name: str, shape: Sequence[Any]) -> ArrayMapping:
        factors = itertools.starmap(factor, dims.axes(name, shape))
        return ArrayMapping(*factors)  # type: ignore[no-untyped-call]

    letters = dict.fromkeys(letter for name in (*operands, *results) for letter in ARRAYS[name].axes)
    whole = tuple(letter.lower() for letter in letters if letter not in "NK")  # in the order of first use
    label = ArrayMapping("label")  # type: ignore[no-untyped-call]
    return SdyShardingRule(
        (*(mapping(name, dims.avals[name].shape) for name in operands), label),
        tuple(mapping(name, dims.shape(name)) for name in results),
        need_replication_factors=whole,
        **({"g": G} if compound else {}),
    )


def _summed(name: str, dims: Dims) -> set[int]:
    """The axes of a cut along which pieces have each a part of a result, or nothing: the query heads of one key head
    for that key head's gradient, and what shares an element for that of an operand."""
    by_key, by_group = dims.rank, dims.rank + 1
    if name in ("dk", "dv"):
        return {by_group}
    if name not in LIKE_OPERANDS:
        return set()
    shared = {axis for axis, full in dims.axes(name, dims.shape(name)) if not full}
    return {axis for axis in shared if isinstance(axis, int)} | ({by_key, by_group} if "N" in shared else set())


class _Cut(NamedTuple):
    """Which device holds which piece: axes are the batch axes, key heads, query heads of one key head, and copies."""

    devices: np.ndarray

    @classmethod
    def of(cls, name: str, x: Any, dims: Dims) -> "_Cut":
        """What is usable of the way that XLA has cut a query-shaped array."""
        tiles, devices = _compat.tile_assignment(x.sharding, len(x.shape))
        heads = dims.rank + ARRAYS[name].axes.index("N")
        K, G = dims.sizes["K"], dims.sizes["N"] // dims.sizes["K"]
        by_key = math.gcd(tiles[heads], K)
        by_group = tiles[heads] // by_key
        tiled = np.reshape(devices, (*tiles[:heads], by_key, by_group, *tiles[heads + 1 :], -1))
        # A shared batch axis has nothing to cut. A group of heads is cut only where each piece has but one key head.
        used = [i for i in range(dims.rank) if x.shape[i] == dims.batch[i]] + [heads]
        used += [heads + 1] if by_key == K and G % by_group == 0 else []
        order = used + [i for i in range(tiled.ndim) if i not in used]
        axes = [i if i < dims.rank else i - heads + dims.rank for i in used]  # of the cut, whose heads follow the batch
        sizes = dict(zip(axes, (tiled.shape[i] for i in used), strict=True))
        return cls(np.transpose(tiled, order).reshape(*(sizes.get(i, 1) for i in range(dims.rank + 2)), -1))

    @property
    def pieces(self) -> int:
        return math.prod(self.devices.shape[:-1])

    def without(self, axes: AbstractSet[int]) -> "_Cut":
        """These axes whole, on each of the devices that had a piece."""
        kept = [1 if axis in axes else size for axis, size in enumerate(self.devices.shape[:-1])]
        return _Cut(self._last(axes).reshape(*kept, -1))

    def groups(self, axes: AbstractSet[int]) -> list[list[int]] | None:
        """The devices between which what lies along these axes is spread; None where it is together."""
        size = math.prod(self.devices.shape[axis] for axis in axes)
        if size == 1:
            return None
        copies = self.devices.shape[-1]
        return np.moveaxis(self._last(axes).reshape(-1, size, copies), -1, -2).reshape(-1, size).tolist()

    def _last(self, axes: AbstractSet[int]) -> np.ndarray:
        """The devices with these axes behind the others, before the copies."""
        order = [i for i in range(self.devices.ndim - 1) if i not in axes] + sorted(axes) + [self.devices.ndim - 1]
        return np.transpose(self.devices, order)

    def sharding(self, name: str, shape: Sequence[Any], dims: Dims) -> Any:
        """How the array `name` is cut; along the others of its axes it is whole."""
        cut, rank = self.devices, dims.rank
        where: dict[Any, list[int]] = {i: [i] for i in range(rank)} | {"N": [rank, rank + 1], "K": [rank]}
        axes = [where.get(axis, []) if full else [] for axis, full in dims.axes(name, shape)]
        used = [i for group in axes for i in group]
        order = used + [i for i in range(cut.ndim) if i not in used]
        tiles = [math.prod(cut.shape[i] for i in group) for group in axes]
        return _compat.tiled_sharding(np.transpose(cut, order).reshape(*tiles, -1))
