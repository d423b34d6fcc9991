"""How near a kernel must come to the truth. Used by the tests and the benchmark; knows arrays, not attention."""

from typing import Any

import jax.numpy as jnp
import numpy as np

_FINFO: Any = jnp.finfo  # typed in some releases of what it comes from, untyped in others


def error_bound(plain: Any, exact: Any, dtype: Any) -> float:
    """The largest absolute error allowed: twice that of plainly done mathematics, plus 8 eps(dtype) max|exact|.

    Nothing here is chosen by looking at a kernel. `plain` (as in the FlashAttention tests) is computed in the precision
    that a kernel accumulates in; the second term is what rounding operands, results and what is between may cost.

    Args:
      plain: the plain result, with -inf (in an lse) only where exact has it.
      exact: the truth, float64 or wider.
      dtype: of the inputs; of the array itself where it is wider (an lse of 16-bit inputs is float32).
    """
    exact = _wide(exact)
    finite = np.isfinite(exact)
    error = np.abs(_wide(plain)[finite] - exact[finite]).max(initial=0)
    size = np.abs(exact[finite]).max(initial=0)
    return float(2 * error + 8 * float(_FINFO(dtype).eps) * size)


def assert_accurate(got: Any, plain: Any, exact: Any, dtype: Any, name: str = "result", slack: float = 1) -> None:
    """Raises AssertionError unless got is within slack times `error_bound` of exact and -inf exactly where exact is."""
    got, exact = _wide(got), _wide(exact)
    if got.shape != exact.shape:
        raise AssertionError(f"{name} has shape {got.shape}, not {exact.shape}")
    bound = slack * error_bound(plain, exact, dtype)
    finite = np.isfinite(exact)
    error = np.where(finite, np.abs(got - np.where(finite, exact, 0)), np.where(got == exact, 0, np.inf))
    wrong = ~(error <= bound)  # also where error is NaN
    if not wrong.any():
        return
    at = np.unravel_index(np.where(wrong, np.nan_to_num(error, nan=np.inf), 0).argmax(), error.shape)
    raise AssertionError(
        f"{name} at {tuple(map(int, at))} is {got[at]}, not {exact[at]}: the error {error[at]:.3e} is above "
        f"{bound:.3e}; {wrong.sum()} of {wrong.size} elements are"
    )


def _wide(x: Any) -> np.ndarray:
    array: np.ndarray = np.asarray(x)
    return array if array.dtype == np.longdouble else array.astype(np.float64)
