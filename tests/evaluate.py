"""Runs a case: the truth, the plain result and a kernel's, each computed once and kept for every test that asks.

A result is a dict: out, lse, and the gradients dquery, dkey, dvalue and those of the case's floating operands (dscale).
"""

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_flash2 import attention, reference
from jax_flash2.testing import assert_accurate


def _backends() -> list[str]:
    try:
        return ["cpu", "cuda"] if jax.devices("cuda") else ["cpu"]
    except RuntimeError:  # no such backend in this process
        return ["cpu"]


BACKENDS = _backends()
DTYPES = ("float32", "float64", "bfloat16", "float16")  # of every backend
Result = dict[str, Any]


def skip_what_cuda_lacks(case: cases.Case, backend: str, dtype: str) -> None:
    in_any_order = {"bias"} if dtype in ("float32", "float64") else {"bias", "alibi_slopes"}
    if backend == "cuda" and case.keywords.get("deterministic") and in_any_order & set(case.operands):
        pytest.skip("on CUDA these gradients are not deterministic, and test_errors sees that they are refused")


def names(case: cases.Case) -> tuple[str, ...]:
    """The gradients that a case has."""
    return ("dquery", "dkey", "dvalue", *(f"d{name}" for name, x in case.operands.items() if x.dtype.kind == "f"))


def rounded(arrays: cases.Arrays, dtype: str) -> cases.Arrays:
    """As the call gets them: q, k, v and dout in dtype; dlse in that of lse."""
    wide = np.float64 if dtype == "float64" else np.float32
    return {name: x.astype(wide if name == "dlse" else jnp.dtype(dtype)) for name, x in arrays.items()}


@functools.cache
def exact(case: cases.Case, dtype: str) -> Result:
    # float64 kernels are measured against something wider still.
    return _oracle(case, dtype, np.longdouble if dtype == "float64" else np.float64, p_from_lse=False)


@functools.cache
def plain(case: cases.Case, dtype: str) -> Result:
    """The same mathematics as the kernels', plainly done where they accumulate: in float32, or float64 for float64."""
    return _oracle(case, dtype, np.float64 if dtype == "float64" else np.float32, p_from_lse=True)


def _oracle(case: cases.Case, dtype: str, real: Any, p_from_lse: bool) -> Result:
    keywords = {name: x for name, x in case.keywords.items() if name != "deterministic"}
    operands = dict(case.operands)
    if "dropout_rng" in operands:  # one seed for each batch row and head, as jax_flash2 documents
        operands["dropout_seeds"] = np.asarray(jax.random.bits(operands.pop("dropout_rng"), (*case.batch, case.N, 2)))
    return oracle.attention(**rounded(case.arrays(), dtype), **keywords, **operands, real=real, p_from_lse=p_from_lse)


@functools.cache
def kernel(case: cases.Case, dtype: str, backend: str) -> Result:
    return _run(attention, case, dtype, backend, {"implementation": backend})


@functools.cache
def jax_reference(case: cases.Case, dtype: str) -> Result:
    # Unoptimised it compiles in a quarter of the time.
    return _run(reference.attention, case, dtype, "cpu", {}, {"xla_backend_optimization_level": 0})


def differentiated(call: Any, static: dict[str, Any]) -> Any:
    """call as a function (differentiable arrays, other arrays, (dout, dlse)) -> Result."""

    def run(primals: Any, others: Any, cotangents: Any) -> Result:
        def forward(primals: Any) -> Any:
            return call(**primals, **others, **static, return_residual=True)

        (out, lse), pullback = jax.vjp(forward, primals)
        (gradients,) = pullback(cotangents)
        return {"out": out, "lse": lse, **{f"d{name}": x for name, x in gradients.items()}}

    return run


def _run(
    call: Any, case: cases.Case, dtype: str, backend: str, more: dict[str, Any], options: dict[str, Any] | None = None
) -> Result:
    with jax.enable_x64(dtype == "float64"), jax.default_device(jax.devices(backend)[0]):
        arrays = {name: jnp.asarray(x) for name, x in (rounded(case.arrays(), dtype) | dict(case.operands)).items()}
        cotangents = arrays.pop("dout"), arrays.pop("dlse")
        primals = {name[1:]: arrays.pop(name[1:]) for name in names(case)}
        run = jax.jit(differentiated(call, dict(case.keywords) | more), compiler_options=options)
        result = run(primals, arrays, cotangents)
        expected = {"out": dtype, "lse": cotangents[1].dtype, **{f"d{name}": x.dtype for name, x in primals.items()}}
        assert {name: x.dtype for name, x in result.items()} == {n: jnp.dtype(d) for n, d in expected.items()}
        return jax.tree.map(np.asarray, result)


def check(got: Result, case: cases.Case, dtype: str, *keys: str, slack: float = 1) -> None:
    """Raises unless these arrays are within the bound of jax_flash2.testing, or `slack` times that."""
    for name in keys:
        own = got[name].dtype  # an lse is float32 or better whatever the inputs are, and the gradient of scale float32
        if name != "lse":
            own = max(own, jnp.dtype(dtype), key=lambda x: float(jnp.finfo(x).eps))
        want, rough = exact(case, dtype)[name], plain(case, dtype)[name]
        assert_accurate(got[name], rough, want, own, name, slack)


def check_zeros(got: Result, case: cases.Case, dtype: str) -> None:
    """Exactly 0: out and dquery of queries that read nothing, dkey and dvalue of keys that nobody reads."""
    truth = exact(case, dtype)
    empty = np.isneginf(truth["lse"])
    unread = (truth["dkey"] == 0).all(-1) & (truth["dvalue"] == 0).all(-1)
    for name, where in (("out", empty), ("dquery", empty), ("dkey", unread), ("dvalue", unread)):
        np.testing.assert_array_equal(got[name][where], 0, err_msg=name)
