"""The two primitives, flash_forward and flash_backward: their types, how a vmap changes them, what they compile to.

Every array is [*B, axes] with the same number of leading batch axes, each full or 1; ARRAYS gives the axes by letter, and
every rule here follows from that table. Results are always full. Knows no keyword of the public API and no gradient rule.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import ffi
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_flash2 import _compat, _cpu
from jax_flash2._spec import EXTRAS, AttentionSpec, Extras

try:
    from jax_flash2 import _cuda
except ImportError as error:
    _cuda, _cuda_error = None, error

FORWARD_TARGET = "jax_flash2_forward_v1"
BACKWARD_TARGET = "jax_flash2_backward_v1"

for _platform, _module in (("cpu", _cpu), ("CUDA", _cuda)):
    if _module is not None:
        for _name, _handler in _module.registrations().items():
            ffi.register_ffi_target(_name, _handler, platform=_platform)


class _Array(NamedTuple):
    axes: str  # letters as in src/core/problem.h; V is Dv, O the rows of the ordering counters
    dtype: str  # "io": that of q; "real": float64 where q is float64, else float32; or a name


# Every array of a call, by name. The tuples below give the order in which the handlers take and give them.
ARRAYS = {
    "q": _Array("TND", "io"),
    "k": _Array("SKD", "io"),
    "v": _Array("SKV", "io"),
    "out": _Array("TNV", "io"),
    "lse": _Array("NT", "real"),
    "dout": _Array("TNV", "io"),
    "dlse": _Array("NT", "real"),
    "dq": _Array("TND", "io"),
    "dk": _Array("SKD", "io"),
    "dv": _Array("SKV", "io"),
    "delta": _Array("NT", "float32"),
    "dq_acc": _Array("NTD", "float32"),
    "dk_acc": _Array("KSD", "float32"),
    "dv_acc": _Array("KSV", "float32"),
    "order": _Array("NO", "int32"),
    **{name: _Array(x.axes, x.dtype) for name, x in EXTRAS._asdict().items()},
    **{f"d{name}": _Array(x.slot, "float32") for name, x in EXTRAS._asdict().items()},
}
_WORKSPACES = ("delta", "dq_acc", "dk_acc", "dv_acc", "order")
_SLOTS = tuple(f"d{name}" for name in Extras._fields)
_OPERANDS = {
    "flash_forward": ("q", "k", "v", *Extras._fields),
    "flash_backward": ("q", "k", "v", "out", "lse", "dout", "dlse", *Extras._fields),
}
_RESULTS = {
    "flash_forward": ("out", "lse"),
    "flash_backward": ("dq", "dk", "dv", *_WORKSPACES, *_SLOTS),
}
_TARGETS = {"flash_forward": FORWARD_TARGET, "flash_backward": BACKWARD_TARGET}
_MAX_BATCH_GROUPS = 4  # kMaxBatchAxes of src/core/problem.h

flash_forward_p = Primitive("flash_forward")
flash_backward_p = Primitive("flash_backward")


def forward(
    q: Any, k: Any, v: Any, extras: Extras, spec: AttentionSpec, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """out [*B, T, N, Dv] and lse [*B, N, T]."""
    results = _bind(flash_forward_p, dict(q=q, k=k, v=v, **extras._asdict()), spec, implementation)
    return results["out"], results["lse"]


def backward(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, extras: Extras, spec: AttentionSpec,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array, Extras]:  # fmt: skip
    """dq, dk, dv, with every batch axis full, and the slots of the extras that are present and have a gradient."""
    arrays = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse, **extras._asdict())
    results = _bind(flash_backward_p, arrays, spec, implementation)
    slots = Extras(*(results.get(name) for name in _SLOTS))
    return results["dq"], results["dk"], results["dv"], slots


def _bind(primitive: Any, arrays: dict[str, Any], spec: AttentionSpec, implementation: str | None) -> dict[str, Any]:
    operands = tuple(name for name, x in arrays.items() if x is not None)
    xs = _compat.match_varying([arrays[name] for name in operands])
    xs = _limit_batch_groups(operands, xs)
    results = primitive.bind(*xs, operands=operands, spec=spec, implementation=implementation)
    return dict(zip(_results(primitive, operands), results, strict=True))


def _results(primitive: Any, operands: Sequence[str]) -> tuple[str, ...]:
    """What the primitive returns: the handler's results without workspaces and absent slots."""
    absent = {f"d{name}" for name in Extras._fields if name not in operands}
    return tuple(
        name
        for name in _RESULTS[primitive.name]
        if name not in _WORKSPACES and name not in absent and ARRAYS[name].axes != "-"
    )


# Types.


class _Dims:
    """The sizes of a call's axes, and how an array of it looks."""

    def __init__(self, operands: Sequence[str], avals: Sequence[Any]):
        self.avals = dict(zip(operands, avals, strict=True))
        q, k, v = (self.avals[name] for name in "qkv")
        self.rank = len(q.shape) - 3  # how many batch axes
        self.sizes = dict(zip("TND", q.shape[-3:], strict=True)) | dict(zip("SKV", (*k.shape[-3:-1], v.shape[-1])))
        self.sizes["O"] = (self.sizes["T"] + 31) // 32 + 1
        self.batch = tuple(self._full([x.shape[i] for x in avals]) for i in range(self.rank))

    @staticmethod
    def _full(sizes: Sequence[Any]) -> Any:
        wide = [size for size in sizes if size != 1]
        if any(size != wide[0] for size in wide):
            raise ValueError(f"the batch axes of attention's operands must be equal or 1, got {sizes}")
        return wide[0] if wide else 1

    def shape(self, name: str) -> tuple[Any, ...]:
        return (*self.batch, *(self.sizes[letter] for letter in ARRAYS[name].axes))

    def dtype(self, name: str) -> Any:
        io = self.avals["q"].dtype
        real = np.dtype("float64" if io == np.float64 else "float32")
        return {"io": io, "real": real}.get(ARRAYS[name].dtype) or np.dtype(ARRAYS[name].dtype)

    def aval(self, name: str) -> Any:
        return _compat.aval_like(self.avals["q"], self.shape(name), self.dtype(name), self._spec(name))

    def absent(self, name: str) -> Any:
        return _compat.aval_like(self.avals["q"], (0,), self.dtype(name))

    def _spec(self, name: str) -> list[Any]:
        """How a result is split over an Explicit mesh: as the operand that it resembles, along batch and heads."""
        specs = {other: _compat.sharding_spec(x) for other, x in self.avals.items()}
        first = {"dk": "k", "dv": "v"}.get(name, "q")
        heads = {"N": specs["q"][-2], "K": specs[first if first != "q" else "k"][-2]}
        spec: list[Any] = []
        for i in range(self.rank):
            full = [n for n in (first, *self.avals) if self.avals[n].shape[i] == self.batch[i]]
            spec.append(specs[full[0]][i])
        return _without_repeats([*spec, *(heads.get(letter) for letter in ARRAYS[name].axes)])


def _without_repeats(spec: Sequence[Any]) -> list[Any]:
    """A mesh axis can split one axis of an array only: the first that asks keeps it."""
    seen: set[Any] = set()
    kept = []
    for entry in spec:
        names = set(entry) if isinstance(entry, tuple) else set() if entry is None else {entry}
        kept.append(None if names & seen else entry)
        seen |= names
    return kept


def _abstract(primitive: Any, *avals: Any, operands: tuple[str, ...], **_: Any) -> list[Any]:
    for name, aval in zip(operands, avals, strict=True):
        letters = ARRAYS[name].axes
        for letter, split in zip(letters, _compat.sharding_spec(aval)[aval.ndim - len(letters) :], strict=True):
            if split is not None and letter not in "NK":
                raise NotImplementedError(
                    f"attention needs whole sequences and head dims on every device, but {name}, {aval.str_short()}, is "
                    f"split along {letter} over mesh axis {split!r}; split batch or heads, or jax.sharding.reshard it"
                )
    dims = _Dims(operands, avals)
    return [dims.aval(name) for name in _results(primitive, operands)]


# vmap. A vmapped axis becomes one more batch axis, of size 1 for operands that lack it, so that nothing is copied.


def _batch(primitive: Any, xs: Any, dims: Any, *, operands: tuple[str, ...], **params: Any) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    rank = xs[0].ndim - 3 - (dims[0] is not None)
    results = _results(primitive, operands)
    after = _beside_heads(operands, xs, dims, rank)
    if after is not None:
        xs = [_join_heads(*args, size, rank, after) for args in zip(operands, xs, dims, strict=True)]
        outs = primitive.bind(*xs, operands=operands, **params)
        split = [_split_heads(name, x, size, rank, after) for name, x in zip(results, outs, strict=True)]
        return [x for x, _ in split], [d for _, d in split]
    # Where most operands have the axis already, if among the batch axes, so that those need no transpose.
    votes = [d for name, d in zip(operands, dims, strict=True) if d is not None and d <= rank and ARRAYS[name].axes]
    at = max(votes, key=votes.count, default=0)
    xs = [jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at) for x, d in zip(xs, dims, strict=True)]
    outs = primitive.bind(*_limit_batch_groups(operands, xs), operands=operands, **params)
    return outs, [at] * len(outs)


def _beside_heads(operands: Sequence[str], xs: Sequence[Any], dims: Sequence[Any], rank: int) -> int | None:
    """Whether the vmapped axis can join the heads by a free reshape: 0 if it stands before them in q, k and v, 1 if
    behind (then key heads must equal query heads, or the groups would be torn), None if it cannot."""
    given = dict(zip(operands, zip(xs, dims, strict=True), strict=True))
    if any(given[name][1] is not None for name in Extras._fields if name in given):
        return None
    places = {d - rank - 1 if d is not None else None for _, d in (given[name] for name in "qkv")}
    after = places.pop()
    if places or after not in (0, 1):
        return None
    q, k = given["q"][0], given["k"][0]
    heads = rank + 1 + (1 - after)
    if after == 1 and q.shape[heads] != k.shape[heads]:
        return None
    if any(split is not None for x, _ in given.values() for split in _compat.sharding_spec(jax.typeof(x))):
        return None  # joining axes split over an Explicit mesh may not be typeable
    return after


def _heads_axis(name: str, rank: int) -> int | None:
    letters = ARRAYS[name].axes
    return next((rank + i for i, letter in enumerate(letters) if letter in "NK"), None)


def _join_heads(name: str, x: Any, dim: int | None, size: Any, rank: int, after: int) -> Any:
    heads = _heads_axis(name, rank)
    if heads is None:
        return x
    if dim is None:
        x = jnp.expand_dims(x, heads + after)
        x = jnp.broadcast_to(x, (*x.shape[: heads + after], size, *x.shape[heads + after + 1 :]))
    else:
        x = jnp.moveaxis(x, dim, heads + after)
    return x.reshape(*x.shape[:heads], x.shape[heads] * x.shape[heads + 1], *x.shape[heads + 2 :])


def _split_heads(name: str, x: Any, size: Any, rank: int, after: int) -> tuple[Any, int]:
    heads = _heads_axis(name, rank)
    assert heads is not None, name  # every result has heads
    pair = (x.shape[heads] // size, size) if after else (size, x.shape[heads] // size)
    return x.reshape(*x.shape[:heads], *pair, *x.shape[heads + 1 :]), heads + after


def _limit_batch_groups(operands: Sequence[str], xs: Sequence[Any]) -> Sequence[Any]:
    """The handlers merge neighbouring batch axes that the same operands share; past what they can count the operands
    are broadcast. Takes four nested vmaps that each leave other operands out."""
    dims = _Dims(operands, xs)
    groups: list[tuple[bool, ...]] = []
    for i, full in enumerate(dims.batch):
        shared = tuple(x.shape[i] == 1 for x in xs)
        if full != 1 and groups[-1:] != [shared]:
            groups.append(shared)
    if len(groups) <= _MAX_BATCH_GROUPS:
        return xs
    return [jnp.broadcast_to(x, (*dims.batch, *x.shape[dims.rank :])) for x in xs]


# Code. One custom call a primitive, the same target on every platform.


def _lower(ctx: Any, *values: Any, primitive: Any, platform: str, operands: Any, spec: Any, implementation: Any) -> Any:
    if implementation not in (None, platform):
        raise NotImplementedError(
            f"implementation={implementation!r} was asked for, but this program is compiled for {platform!r}: "
            f"place its inputs on a {implementation} device, or leave implementation=None"
        )
    dims = _Dims(operands, ctx.avals_in)
    if platform == "cuda":
        _check_cuda(primitive, dims)
        width = -(-max(dims.sizes["D"], dims.sizes["V"]) // 8) * 8
        if (dims.sizes["D"], dims.sizes["V"]) != (width, width):
            call = functools.partial(_padded, primitive, width)
            return mlir.lower_fun(call, multiple_results=True)(
                ctx, *values, operands=operands, spec=spec, implementation=implementation
            )
    given = dict(zip(operands, values, strict=True))
    ins, avals_in = [], []
    for name in _OPERANDS[primitive.name]:
        aval = dims.avals.get(name, dims.absent(name))
        ins.append(given[name] if name in given else mlir.ir_constant(np.zeros(aval.shape, aval.dtype)))
        avals_in.append(aval)
    results = _results(primitive, operands)
    wanted = {*results, *(_workspaces(dims, spec) if platform == "cuda" else ())}
    names = _RESULTS[primitive.name]
    avals_out = [dims.aval(name) if name in wanted else dims.absent(name) for name in names]
    rule = ffi.ffi_lowering(_TARGETS[primitive.name])
    outs = rule(ctx.replace(avals_in=avals_in, avals_out=avals_out), *ins, **dataclasses.asdict(spec))
    return [out for name, out in zip(names, outs, strict=True) if name in results]


def _workspaces(dims: _Dims, spec: AttentionSpec) -> list[str]:
    """What the CUDA backward scribbles on. A pure function of shapes and spec: lowering may happen on another machine."""
    grouped = ["dk_acc", "dv_acc"] if dims.sizes["N"] != dims.sizes["K"] else []
    return ["delta", "dq_acc", *grouped, *(["order"] if spec.deterministic else [])]


def _padded(primitive: Any, width: int, *xs: Any, operands: tuple[str, ...], **params: Any) -> list[Any]:
    """Zeros up to one head dim that the CUDA kernels take: an extra copy of each array, and of each result."""
    dims = _Dims(operands, xs)
    wide = [
        jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) if ARRAYS[name].axes[-1:] in ("D", "V") else x
        for name, x in zip(operands, xs, strict=True)
    ]
    outs = primitive.bind(*wide, operands=operands, **params)
    results = _results(primitive, operands)
    return [
        x[..., : dims.sizes[ARRAYS[name].axes[-1]]] if ARRAYS[name].axes[-1] in "DV" else x
        for name, x in zip(results, outs, strict=True)
    ]


def _check_cuda(primitive: Any, dims: _Dims) -> None:
    served = {"bfloat16": "bf16", "float16": "f16"}
    dtype = str(dims.avals["q"].dtype)
    if dtype not in served:
        raise NotImplementedError(
            f"attention on CUDA serves {' and '.join(served)}, got {dtype}: cast query, key and value, or run it on CPU"
        )
    if _cuda is None:
        if _has_cuda_device():
            why = "was built without its CUDA code" if isinstance(_cuda_error, ModuleNotFoundError) else "cannot load it"
            raise RuntimeError(
                f"attention was asked to run on a GPU, but this install of jax_flash2 {why} ({_cuda_error}). Install it "
                "from source where nvcc is on PATH, or with JAX_FLASH2_FETCH_NVCC=1 set, which lets the build fetch nvcc"
            )
        return  # compiling for another machine
    direction = primitive.name.removeprefix("flash_")
    head_dims = [row[3] for row in _cuda.instances() if row[1] == direction and row[2] == served[dtype]]
    width = max(dims.sizes["D"], dims.sizes["V"])
    if width > max(head_dims, default=0):
        raise NotImplementedError(
            f"this install of jax_flash2 serves head dims up to {max(head_dims, default=0)} for {dtype} on CUDA, got "
            f"{width}: run it on CPU, or rebuild with more head dims"
        )


def _has_cuda_device() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:  # no such backend in this process
        return False


def _no_second_derivative(primals: Any, tangents: Any, **_: Any) -> Any:
    raise NotImplementedError(
        "attention has first derivatives in reverse mode (jax.grad, jax.vjp, jax.jacrev); forward mode and derivatives "
        "of derivatives are not served. jax_flash2.reference.attention has both, in O(T S) memory"
    )


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What to pass as `disabled_checks` to `jax.export.export`: it refuses custom calls whose names it does not know."""
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _TARGETS.values()]


for _primitive in (flash_forward_p, flash_backward_p):
    _primitive.multiple_results = True
    _compat.run_eagerly(_primitive)
    _primitive.def_abstract_eval(functools.partial(_abstract, _primitive))
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
    ad.primitive_jvps[_primitive] = _no_second_derivative
    for _platform in ("cpu", "cuda"):
        mlir.register_lowering(
            _primitive, functools.partial(_lower, primitive=_primitive, platform=_platform), platform=_platform
        )
