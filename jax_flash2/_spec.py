"""What one call asks for, as plain data: the Python mirror of the two lists in src/core/spec.h.

Knows names, types and neutral values; no meaning, no shapes, no JAX. A test compares it with what the native module
reports. The lists are append-only, because exported programs outlive the version that wrote them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_LENGTH = 2**29  # positions are int32 in the kernels, and sums of three of them must fit


@dataclass(frozen=True)
class AttentionSpec:
    """Scalar options, compile-time constants of a program. See src/core/spec.h for what each means."""

    scale: float = 1.0
    softcap: float = 0.0
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    deterministic: bool = False
    dropout_rate: float = 0.0
    longest_span: int = -1


class Extras(NamedTuple):
    """Optional operands: an array [*#B, axes] each (every axis full or 1), or None where absent."""

    scale: Any = None  # takes the place of AttentionSpec.scale
    query_lens: Any = None
    key_lens: Any = None
    mask: Any = None
    query_ids: Any = None
    key_ids: Any = None  # query_ids without key_ids: one array for both
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    seeds: Any = None  # of dropout
    key_spans: Any = None
    query_spans: Any = None
    span_flags: Any = None
    positions: Any = None


class Operand(NamedTuple):
    """What an optional operand looks like. Letters follow the batch axes: see src/core/problem.h for each."""

    dtype: str  # "real": float64 where that of q is, else float32; "float": its own, floating; or a name
    axes: str
    slot: str  # the letters of its gradient's slot in the backward; "=": of its own shape; "-": it has no gradient

    @property
    def slot_dtype(self) -> str:
        return "real" if self.dtype in ("real", "float") else "float32"


EXTRAS = Extras(
    scale=Operand("float32", "", "NT"),
    query_lens=Operand("int32", "", "-"),
    key_lens=Operand("int32", "", "-"),
    mask=Operand("bool", "NTS", "-"),
    query_ids=Operand("int32", "T", "-"),
    key_ids=Operand("int32", "S", "-"),
    bias=Operand("float", "NTS", "="),
    alibi_slopes=Operand("real", "N", "NT"),
    sinks=Operand("real", "N", "NT"),
    seeds=Operand("uint32", "NW", "-"),
    key_spans=Operand("int32", "TW", "-"),
    query_spans=Operand("int32", "SW", "-"),
    span_flags=Operand("int32", "", "-"),
    positions=Operand("int32", "T", "-"),
)
