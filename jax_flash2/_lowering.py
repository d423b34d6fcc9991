"""What the two primitives of attention compile to: one custom call each, to the same target on every platform.

Knows the handlers' calling convention, and what the CUDA kernels take. Looks at no device but to say why a call cannot
run: a program may be compiled here and run elsewhere.
"""

import dataclasses
import functools
from collections.abc import Container, Sequence
from typing import Any

import jax
import numpy as np
from jax import ffi
from jax import numpy as jnp
from jax.interpreters import mlir

from jax_flash2 import _compat, _native, _packing, _reads, _sharding, _spans
from jax_flash2._arrays import ARRAYS, OPERANDS, RESULTS, Dims, results_of
from jax_flash2._spec import AttentionSpec

TARGETS = {
    "flash_forward": "jax_flash2_forward_v1",
    "flash_backward": "jax_flash2_backward_v1",
    "extents": _spans.EXTENTS_TARGET,
    "packs": _packing.PACKS_TARGET,
}


def lower(
    ctx: Any,
    *values: Any,
    primitive: Any,
    platform: str,
    operands: tuple[str, ...],
    prepared: bool = False,
    **params: Any,
) -> Any:
    """The lowering rule of both primitives for "cpu" and "cuda". prepared: its operands are those of `_prepared`."""
    fixed, spec, implementation = params["fixed"], params["spec"], params["implementation"]
    if implementation not in (None, platform):
        raise NotImplementedError(
            f"implementation={implementation!r} was asked for, but this program is compiled for {platform!r}: "
            f"place its inputs on a {implementation} device, or leave implementation=None"
        )
    dims = Dims(operands, ctx.avals_in)
    if platform == "cuda":
        _check_cuda(primitive, dims, operands, fixed, spec)
        if any(_padding(dims, axis) for axis in "DV"):
            padded = functools.partial(_padded, primitive, operands)
            return mlir.lower_fun(padded)(ctx, *values, **params)
    devices = _compat.automatic_devices(ctx)
    if devices > 1 and not _compat.is_export(ctx):
        call = _sharding.partitioned(primitive, operands, ctx.avals_in, devices, **params)
        return _compat.lower_partitioned(call, ctx, *values)
    if platform == "cuda" and not prepared and any(name in operands for name in ("mask", "query_ids", "bias")):
        prepare = functools.partial(_prepared, primitive, operands)
        return mlir.lower_fun(prepare)(ctx, *values, **params)
    given = dict(zip(operands, values, strict=True))
    if "query_ids" in given and "key_ids" not in given:
        given["key_ids"], dims.avals["key_ids"] = given["query_ids"], dims.avals["query_ids"]
    taken = _up_to_last(OPERANDS[primitive.name], given)
    avals_in = [dims.avals.get(name, dims.absent(name)) for name in taken]
    arrays_in = [
        given[name] if name in given else mlir.ir_constant(np.zeros(aval.shape, aval.dtype))
        for name, aval in zip(taken, avals_in, strict=True)
    ]
    returned = results_of(primitive, operands, fixed)
    written = {*returned, *(_workspaces(dims) if platform == "cuda" else ())}
    results = _up_to_last(RESULTS[primitive.name], written)
    avals_out = [dims.aval(x) if x in written else dims.absent(x) for x in results]
    call = ffi.ffi_lowering(TARGETS[primitive.name])
    outs = call(ctx.replace(avals_in=avals_in, avals_out=avals_out), *arrays_in, **dataclasses.asdict(spec))
    return [out for name, out in zip(results, outs, strict=True) if name in returned]


def _up_to_last(names: Sequence[str], present: Container[str]) -> Sequence[str]:
    """Without the absent ones at the end, which handlers do not miss: each would cost XLA an array."""
    last = max(i for i, name in enumerate(names) if name in present)
    return names[: last + 1]


def _workspaces(dims: Dims) -> list[str]:
    """What the CUDA kernels scribble on, those of both passes: a pure function of shapes and of the dtype."""
    if _itemsize(dims) > 2:
        return ["delta"]
    grouped = ["dk_acc", "dv_acc"] if dims.sizes["N"] != dims.sizes["K"] else []
    return ["queue", "delta", "dq_acc", *grouped, "order"]


def _itemsize(dims: Dims) -> int:
    return int(np.dtype(dims.avals["q"].dtype).itemsize)


def _padding(dims: Dims, axis: str) -> int:
    """What a head lacks to the next width that the CUDA kernels take: rows of 16 bytes."""
    return -dims.sizes[axis] % (16 // _itemsize(dims))  # type: ignore[no-any-return]


def _padded(primitive: Any, operands: tuple[str, ...], *xs: Any, **params: Any) -> list[Any]:
    """Zeros up to widths that the CUDA kernels take. Costs a copy of each such array, and of each such result."""
    dims = Dims(operands, xs)
    wide = [
        jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, _padding(dims, ARRAYS[name].axes[-1]))]) if _is_wide(name) else x
        for name, x in zip(operands, xs, strict=True)
    ]
    outs = primitive.bind(*wide, operands=operands, **params)
    return [
        x[..., : dims.sizes[ARRAYS[name].axes[-1]]] if _is_wide(name) else x
        for name, x in zip(results_of(primitive, operands, params["fixed"]), outs, strict=True)
    ]


def _prepared(primitive: Any, operands: tuple[str, ...], *xs: Any, spec: AttentionSpec, **params: Any) -> list[Any]:
    """NaN where nobody looks would reach results by 0 * NaN in a product, so kernels must know who looks: by spans, or,
    where heads differ, by zeros in a copy."""
    spans = _spans.of(operands, xs, spec, native=True) if _spans.has_source(operands) else {}
    heads = Dims(operands, xs).avals["mask"].shape[-3] if "mask" in operands else 1
    if "bias" in operands or heads != 1 or not spans:
        xs = tuple(_reads.cleared(operands, xs, spec))
    operands, xs = (*operands, *spans), (*xs, *spans.values())
    return primitive.bind(*xs, operands=operands, spec=spec, prepared=True, **params)  # type: ignore[no-any-return]


def _is_wide(name: str) -> bool:
    return ARRAYS[name].axes[-1:] in ("D", "V")


def _check_cuda(primitive: Any, dims: Dims, operands: Sequence[str], fixed: Sequence[str], spec: AttentionSpec) -> None:
    dtype = str(dims.avals["q"].dtype)
    moving = {*operands} - {*fixed}
    shared_sums = ["alibi_slopes"] if "alibi_slopes" in moving and _itemsize(dims) == 2 else []
    if "bias" in moving and any(not full for _, full in dims.axes("bias", dims.avals["bias"].shape)):
        shared_sums.append("a shared bias")
    if shared_sums and spec.deterministic and primitive.name == "flash_backward":
        raise NotImplementedError(
            f"deterministic=True on CUDA does not serve the gradient of {' and '.join(shared_sums)}: the kernels sum "
            "it in any order. Leave deterministic=False, broadcast the bias to [*B, N, T, S], differentiate in the "
            "others alone, or run it on CPU"
        )
    if _native.cuda is None:
        if _has_cuda_device():
            raise RuntimeError(
                f"attention was asked to run on a GPU, but this install of jax_flash2 {_native.cuda_missing}. Install "
                "it from source where nvcc is on PATH, or with JAX_FLASH2_FETCH_NVCC=1 set, which lets the build fetch "
                "nvcc; implementation='reference' runs anywhere, in O(T S) memory"
            )
        return  # compiling for another machine
    direction = primitive.name.removeprefix("flash_")
    rows = [row for row in _native.cuda.instances() if row[1] == direction and row[2] == _native.CUDA_DTYPES[dtype]]
    head_dims = [min(head_dim, value_dim) for *_, head_dim, value_dim in rows]
    width = max(dims.sizes["D"], dims.sizes["V"])
    if not head_dims:
        raise NotImplementedError(
            f"this install of jax_flash2 was built without the CUDA kernels for {dtype}: cast query, key and value, "
            "run it on CPU, or rebuild with the default of JAX_FLASH2_KERNELS"
        )
    if width > max(head_dims):
        raise NotImplementedError(
            f"this install of jax_flash2 serves head dims up to {max(head_dims)} for {dtype} on CUDA, got {width}: "
            "run it on CPU, or rebuild with more of JAX_FLASH2_HEAD_DIMS"
        )


def _has_cuda_device() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:  # no such backend in this process
        return False
