"""What differs between the JAX versions served (0.7 to 0.12), or is not public in all of them, and nothing else."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
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
