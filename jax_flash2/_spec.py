"""What one call asks for, as plain data: the Python mirror of the two lists in src/core/spec.h.

Knows names, types and neutral values; no meaning, no shapes, no JAX. A test compares it with what the native module
reports. The lists are append-only, because exported programs outlive the version that wrote them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class AttentionSpec:
    """Scalar options, compile-time constants of a program. See src/core/spec.h for what each means."""

    scale: float = 1.0
    softcap: float = 0.0
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    deterministic: bool = False


class Extras(NamedTuple):
    """Optional operands: an array [*#B, axes] each (every axis full or 1), or None where absent."""

    scale: Any = None  # takes the place of AttentionSpec.scale; the only one with a gradient
    query_lens: Any = None
    key_lens: Any = None


class Operand(NamedTuple):
    """What an optional operand looks like. Letters follow the batch axes: see src/core/problem.h for each."""

    dtype: str
    axes: str
    slot: str  # the letters of its gradient's slot in the backward, float32; "-" where it has no gradient


EXTRAS = Extras(
    scale=Operand("float32", "", "NT"),
    query_lens=Operand("int32", "", "-"),
    key_lens=Operand("int32", "", "-"),
)
