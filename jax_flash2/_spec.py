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
    """Optional operands, one value a batch row: arrays [*#B] (each batch axis full or 1), or None where absent."""

    scale: Any = None  # float32, takes the place of AttentionSpec.scale; has a gradient
    query_lens: Any = None  # int32
    key_lens: Any = None  # int32
