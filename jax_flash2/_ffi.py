"""Attention's two primitives, flash_forward and flash_backward, and how to call them. Knows no keyword and no gradient
rule.

Both have the same parameters: the names of the operands that are present, of those among them whose gradient nobody
wants, the spec, and the implementation insisted on.
Their vmap rule is in _vmap, their tangents in _jvp, their code in _lowering.
"""

import functools
from typing import Any

from jax import Array, export
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_flash2 import _compat, _jvp, _lowering, _vmap
from jax_flash2._arrays import ARRAYS, SLOTS, Dims, results_of
from jax_flash2._spec import AttentionSpec, Extras

flash_forward_p = Primitive("flash_forward")
flash_backward_p = Primitive("flash_backward")


def forward(
    q: Any, k: Any, v: Any, extras: Extras, spec: AttentionSpec, implementation: str | None
) -> tuple[Array, Array]:
    """out [*B, T, N, Dv] and lse [*B, N, T]."""
    results = _bind(flash_forward_p, dict(q=q, k=k, v=v, **extras._asdict()), (), spec, implementation)
    return results["out"], results["lse"]


def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,  # None where lse was not returned
    extras: Extras,
    fixed: tuple[str, ...],
    spec: AttentionSpec,
    implementation: str | None,
) -> tuple[Array, Array, Array, Extras]:
    """dq, dk, dv, with every batch axis full, and the slots of the extras that are present, not `fixed`, and have a
    gradient."""
    arrays = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse, **extras._asdict())
    results = _bind(flash_backward_p, arrays, fixed, spec, implementation)
    return results["dq"], results["dk"], results["dv"], Extras(*(results.get(name) for name in SLOTS))


def export_checks() -> list[export.DisabledSafetyCheck]:
    """What `jax.export.export` needs as `disabled_checks`: it refuses custom calls whose names it does not know."""
    return [export.DisabledSafetyCheck.custom_call(name) for name in _lowering.TARGETS.values()]


def _bind(
    primitive: Any, arrays: dict[str, Any], fixed: tuple[str, ...], spec: AttentionSpec, implementation: str | None
) -> dict[str, Any]:
    operands = tuple(name for name, x in arrays.items() if x is not None)
    xs = _vmap.limit_batch_groups(operands, _compat.match_varying([arrays[name] for name in operands]))
    results = primitive.bind(*xs, operands=operands, fixed=fixed, spec=spec, implementation=implementation)
    return dict(zip(results_of(primitive, operands, fixed), results, strict=True))


def _abstract(primitive: Any, *avals: Any, operands: tuple[str, ...], fixed: tuple[str, ...], **_: Any) -> list[Any]:
    for name, aval in zip(operands, avals, strict=True):
        letters = ARRAYS[name].axes
        for letter, split in zip(letters, _compat.sharding_spec(aval)[aval.ndim - len(letters) :], strict=True):
            if split is not None and letter not in "NK":
                raise NotImplementedError(
                    f"attention needs whole sequences and head dims on each device, but {name} {aval.str_short()} is "
                    f"split along {letter} over {split!r}: split batch or heads instead, with jax.sharding.reshard. "
                    "(ring_attention, for sequences that are split over devices, is not in this version.)"
                )
    dims = Dims(operands, avals)
    return [dims.aval(name) for name in results_of(primitive, operands, fixed)]


for _primitive in (flash_forward_p, flash_backward_p):
    _primitive.multiple_results = True
    _compat.run_eagerly(_primitive)
    _primitive.def_abstract_eval(functools.partial(_abstract, _primitive))  # type: ignore[no-untyped-call]
    batching.primitive_batchers[_primitive] = functools.partial(_vmap.batch, _primitive)
    ad.primitive_jvps[_primitive] = functools.partial(_jvp.jvp, _primitive)
    for _platform in ("cpu", "cuda"):
        _rule = functools.partial(_lowering.lower, primitive=_primitive, platform=_platform)
        mlir.register_lowering(_primitive, _rule, platform=_platform)
