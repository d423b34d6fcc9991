"""Every array of a call, once: which axes it has, of what dtype, in which order the handlers take and give it.

Each is [*B, axes] with the same number of leading batch axes, each full or 1; results are full, but for slots of an
operand's own shape. The types, vmap rules and custom calls of the primitives follow from the table. Mirrors
src/ffi/decode.cc; runs nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_flash2 import _compat
from jax_flash2._spec import EXTRAS, Extras


class _Array(NamedTuple):
    axes: str  # letters as in src/core/problem.h; V is Dv, O counters of what is done of a head, W the words of a seed
    dtype: str  # "io": that of q; "real": float64 where q is float64, else float32; "float": its own; or a name


ARRAYS = {
    "q": _Array("TND", "io"),
    "k": _Array("SKD", "io"),
    "v": _Array("SKV", "io"),
    "out": _Array("TNV", "io"),
    "lse": _Array("NT", "real"),
    "dout": _Array("TNV", "io"),
    "dlse": _Array("NT", "real"),
    "queue": _Array("N", "int32"),
    "dq": _Array("TND", "io"),
    "dk": _Array("SKD", "io"),
    "dv": _Array("SKV", "io"),
    "delta": _Array("NT", "real"),
    "dq_acc": _Array("NTD", "float32"),
    "dk_acc": _Array("KSD", "float32"),
    "dv_acc": _Array("KSV", "float32"),
    "order": _Array("NO", "int32"),
    **{name: _Array(x.axes, x.dtype) for name, x in EXTRAS._asdict().items()},
    **{
        f"d{name}": _Array(x.axes if x.slot == "=" else x.slot, x.slot_dtype)
        for name, x in EXTRAS._asdict().items()
        if x.slot != "-"
    },
}
WORKSPACES = ("queue", "delta", "dq_acc", "dk_acc", "dv_acc", "order")
SLOTS = tuple(f"d{name}" for name in Extras._fields)
# Gradients that are shared as their operands are: a device, or a vmapped instance, that has part of what shares an
# element has part of its sum.
LIKE_OPERANDS = {f"d{name}": name for name, x in EXTRAS._asdict().items() if x.slot == "="}

# By primitive, in the handlers' order. What a call lacks is passed as an array of size zero.
OPERANDS = {
    "flash_forward": ("q", "k", "v", *Extras._fields),
    "flash_backward": ("q", "k", "v", "out", "lse", "dout", "dlse", *Extras._fields),
}
RESULTS = {
    "flash_forward": ("out", "lse", "queue"),
    "flash_backward": ("dq", "dk", "dv", "delta", "dq_acc", "dk_acc", "dv_acc", "order", *SLOTS),
}


def results_of(primitive: Any, operands: Sequence[str], fixed: Sequence[str]) -> tuple[str, ...]:
    """What a primitive returns: the handler's results but for workspaces and the slots of what has no gradient, or is
    `fixed`: nobody wants its gradient."""
    absent = {f"d{name}" for name in Extras._fields if name not in operands or name in fixed}
    return tuple(x for x in RESULTS[primitive.name] if x in ARRAYS and x not in WORKSPACES and x not in absent)


class Dims:
    """The sizes of a call's axes, read from its operands (arrays or types), and what any array of it looks like."""

    def __init__(self, operands: Sequence[str], avals: Sequence[Any]):
        self.avals = dict(zip(operands, avals, strict=True))
        q, k, v = (self.avals[name] for name in "qkv")
        self.rank = len(q.shape) - 3  # how many batch axes
        self.sizes = dict(zip("TNDSKV", (*q.shape[-3:], *k.shape[-3:-1], v.shape[-1]), strict=True))
        self.sizes["W"] = 2
        self.sizes["O"] = (self.sizes["T"] + 31) // 32 + 1
        self.batch = tuple(_full([x.shape[i] for x in avals]) for i in range(self.rank))

    def shape(self, name: str) -> tuple[Any, ...]:
        """Of a result, or of what a full operand would be."""
        if name in LIKE_OPERANDS:
            return tuple(self.avals[LIKE_OPERANDS[name]].shape)
        return (*self.batch, *(self.sizes[letter] for letter in ARRAYS[name].axes))

    def dtype(self, name: str) -> np.dtype[Any]:
        io = np.dtype(self.avals["q"].dtype)
        real = np.dtype("float64" if io == np.float64 else "float32")
        kind = ARRAYS[name].dtype if name in ARRAYS else "float32"
        if kind == "float":
            return np.dtype(self.avals[name].dtype if name in self.avals else "float32")
        return io if kind == "io" else real if kind == "real" else np.dtype(kind)

    def aval(self, name: str) -> Any:
        """The type of a result."""
        return _compat.aval_like(self.avals["q"], self.shape(name), self.dtype(name), self._spec(name))

    def absent(self, name: str) -> Any:
        return _compat.aval_like(self.avals["q"], (0,), self.dtype(name))

    def axes(self, name: str, shape: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
        """Each axis of an array, a batch axis by its number, another by its letter; and whether it is full."""
        for i, size in enumerate(self.batch):
            yield i, shape[i] == size
        for letter, size in zip(ARRAYS[name].axes, shape[self.rank :], strict=True):
            yield letter, size == self.sizes[letter]

    def _spec(self, name: str) -> list[Any]:
        """How a result is split over an Explicit mesh: along batch and heads, as the operand that it resembles."""
        specs = {other: _compat.sharding_spec(x) for other, x in self.avals.items()}
        model = {"dk": "k", "dv": "v"}.get(name, "q")
        heads = {"N": specs["q"][-2], "K": specs["v" if model == "v" else "k"][-2]}
        spec: list[Any] = []
        for axis, full in self.axes(name, self.shape(name)):
            if not full or isinstance(axis, str):
                spec.append(heads.get(axis) if full else None)
            else:
                size = self.batch[axis]
                like = next(other for other in (model, *self.avals) if self.avals[other].shape[axis] == size)
                spec.append(specs[like][axis])
        return _without_repeats(spec)


def _full(sizes: Sequence[Any]) -> Any:
    wide = [size for size in sizes if size != 1]
    if any(size != wide[0] for size in wide):
        raise ValueError(f"the batch axes of attention's operands must be equal or 1, got {sizes}")
    return wide[0] if wide else 1


def _without_repeats(spec: Sequence[Any]) -> list[Any]:
    """A mesh axis can split one axis of an array only: the first that asks keeps it."""
    seen: set[Any] = set()
    kept = []
    for entry in spec:
        names = set(entry) if isinstance(entry, tuple) else set() if entry is None else {entry}
        kept.append(None if names & seen else entry)
        seen |= names
    return kept
