"""What differs between the JAX versions served (0.7 to 0.12), or is not public in all of them, and nothing else."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import PartitionSpec


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes along which `x` differs, in a shard_map that tracks them; else nothing."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # jax >= 0.10
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying


def match_varying(arrays: Sequence[Any]) -> list[Any]:
    """Casts every array to the union of their varying axes. The cast's transpose sums over the added axes, so that the
    gradient of an array that is shared between shards is the whole one."""
    union = frozenset[Any]().union(*map(varying_axes, arrays))
    return [_to_varying(x, tuple(sorted(union - varying_axes(x), key=str))) for x in arrays]


def _to_varying(x: Any, axes: tuple[Any, ...]) -> Any:
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return getattr(jax.lax, "pvary")(x, axes)  # noqa: B009 (jax 0.7, and only there)


def aval_like(aval: Any, shape: Sequence[Any], dtype: Any, spec: Sequence[Any] | None = None) -> Any:
    """A type like `aval`'s: it varies along the same manual axes and lives on the same mesh, sharded as `spec` says."""
    sharding = aval.sharding.update(spec=PartitionSpec(*(spec or [None] * len(shape))))  # type: ignore[no-untyped-call]
    return aval.update(shape=tuple(shape), dtype=jax.numpy.dtype(dtype), weak_type=False, sharding=sharding)


def sharding_spec(aval: Any) -> tuple[Any, ...]:
    """The mesh axes that each axis of `aval` is split over, None for none. Only Explicit ones show in types."""
    spec: tuple[Any, ...] = tuple(aval.sharding.spec)
    return (*spec, *[None] * (aval.ndim - len(spec)))


def split_as(like: Any, x: Any) -> Any:
    """`x`, which has `like`'s shape, split over its Explicit mesh as `like` is, which may know of no mesh."""
    spec, sharding = sharding_spec(jax.typeof(like)), jax.typeof(x).sharding
    if sharding_spec(jax.typeof(x)) == spec:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*spec)))  # type: ignore[no-untyped-call]


@functools.cache
def _compiled(primitive: Any, **params: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return primitive.bind(*args, **params)

    call.__name__ = primitive.name
    return jax.jit(call)


def run_eagerly(primitive: Any) -> None:
    """Lets `primitive` run outside jit. (JAX's own apply_primitive, which does the same, is private.)"""

    def impl(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # compiling is the only way to run it
            return _compiled(primitive, **params)(*args)

    primitive.def_impl(impl)


# Partitioning by XLA.


class _TiledSharding(jax.sharding.Sharding):
    """What a partitioning function may return: a sharding by device numbers, not by axes of a mesh that it has not."""

    def __init__(self, hlo_sharding: Any):
        self._hlo_sharding = hlo_sharding

    def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
        return self._hlo_sharding


def tiled_sharding(devices: np.ndarray) -> Any:
    """Cuts each axis of an array in as many pieces as `devices` has along it; its last axis holds copies."""
    if devices.size == devices.shape[-1]:
        return replicated()
    copied = devices.shape[-1] > 1
    tiles = devices if copied else devices[..., 0]
    types = [xla_client.OpSharding.Type.REPLICATED] if copied else []
    return _TiledSharding(xla_client.HloSharding.subgroup_with_device_ordering(tiles, subgroup_types=types))


def replicated() -> Any:
    return _TiledSharding(xla_client.HloSharding.replicate())


def tile_assignment(sharding: Any, rank: int) -> tuple[list[int], list[int]]:
    """In how many pieces XLA has cut each axis, and the number of the device that holds each piece, and each copy."""
    hlo = sharding._hlo_sharding
    if not hlo.is_tiled():
        return [1] * rank, [0]
    return hlo.tile_assignment_dimensions()[:rank], hlo.tile_assignment_devices()


def automatic_devices(ctx: Any) -> int:
    """Over how many devices XLA may cut what is being lowered. 1: none, or a shard_map over all axes."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return 1  # the older partitioner takes no rules; it gathers
    context = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):  # jit
        return int(context.num_devices)
    if hasattr(context, "manual_axes"):  # shard_map
        free = [size for name, size in context.mesh.shape.items() if name not in context.manual_axes]
        return int(context.mesh.size) if math.prod(free) > 1 else 1
    return 1


def is_export(ctx: Any) -> bool:
    return bool(ctx.module_context.lowering_parameters.for_export)


def lower_partitioned(function: Any, ctx: Any, *values: Any) -> Any:
    """Lowers a `custom_partitioning`. Its own rule wants the devices, which it then only counts; a primitive that asks
    JAX for them could no longer be compiled for an AbstractMesh, nor beside arrays on other meshes."""
    context = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):
        devices = (jax.local_devices()[0],) * context.num_devices
        context = dataclasses.replace(context, device_assignment=devices, abstract_mesh=None)
    elif isinstance(context.mesh, jax.sharding.AbstractMesh):
        devices = np.full(tuple(context.mesh.shape.values()), jax.local_devices()[0])
        context = dataclasses.replace(context, mesh=jax.sharding.Mesh(devices, context.mesh.axis_names))
    ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
    alive = ctx.module_context.keepalives
    before = len(alive)
    outs = mlir.lower_fun(function)(ctx, *values)
    alive[before:] = map(_Alive, alive[before:])
    return outs


class _Alive:
    """Holds what the partitioner calls while it compiles, and is nothing in an executable that is pickled."""

    def __init__(self, held: Any):
        self.held = held

    def __reduce__(self) -> Any:
        return _Alive, (None,)


def sum_over_groups(x: Any, groups: Sequence[Sequence[int]]) -> Any:
    """The sum of `x` over each group of devices, in no less than float32. Only in what a partitioning function returns.
    (psum writes its addition with the types of the mesh around, which an Explicit one forbids there.)"""
    return _sum_over_groups_p.bind(x, groups=tuple(map(tuple, groups)))  # type: ignore[no-untyped-call]


_sum_over_groups_p = Primitive("sum_over_groups")
_sum_over_groups_p.def_abstract_eval(lambda x, *, groups: x)  # type: ignore[no-untyped-call]


def _lower_sum_over_groups(ctx: Any, x: Any, *, groups: Sequence[Sequence[int]]) -> Any:
    shape, dtype = ctx.avals_in[0].shape, ctx.avals_in[0].dtype
    element = ir.F64Type.get() if dtype == np.float64 else ir.F32Type.get()
    wide = stablehlo.convert(ir.RankedTensorType.get(shape, element), x)
    channel = stablehlo.ChannelHandle.get(1, 1)  # any number, from device to device
    ids = ir.DenseIntElementsAttr.get(np.asarray(groups, np.int64))
    op = stablehlo.AllReduceOp(
        [wide.type], [wide], replica_groups=ids, channel_handle=channel, use_global_device_ids=True
    )
    scalar = ir.RankedTensorType.get([], element)
    body = op.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return [stablehlo.convert(x.type, op.results[0])]


mlir.register_lowering(_sum_over_groups_p, _lower_sum_over_groups)
