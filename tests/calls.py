"""What the tests of JAX's transformations share: a call with every gradient, small random arrays, what is near enough.

They compare a transformed call with the same call made plainly (a Python loop, the whole array on one device), so they
need no oracle but where they say so.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import attention

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

# Every dim distinct and > 1.
B, T, S, N, K, D, DV = 2, 7, 9, 6, 3, 5, 8

DTYPE = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 5e-2}
NAMES = ("query", "key", "value", "scale", "query_lens", "key_lens", "dout", "dlse")
SHAPES = {
    "query": (B, T, N, D),
    "key": (B, S, K, D),
    "value": (B, S, K, DV),
    "scale": (B,),
    "query_lens": (B,),
    "key_lens": (B,),
    "dout": (B, T, N, DV),
    "dlse": (B, T, N),
}


def random(seed: int, name: str, shape: tuple[int, ...], dtype: Any = DTYPE) -> jax.Array:
    """The argument `name`, some lengths being 0 and some past the end."""
    rng = np.random.default_rng([seed, *name.encode()])
    if name.endswith("lens"):
        return jnp.asarray(rng.integers(0, {"query_lens": T, "key_lens": S}[name] + 3, shape), jnp.int32)
    if name == "scale":
        return jnp.asarray(rng.uniform(0.2, 0.9, shape), jnp.float32)
    real = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.asarray(rng.standard_normal(shape), real if name == "dlse" else dtype)


def inputs(*shape: int) -> jax.Array:
    """What a layer is given in a test, float32: the same for the same shape."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def arguments(seed: int, *names: str, dtype: Any = DTYPE) -> list[jax.Array]:
    return [random(seed, name, SHAPES[name], dtype) for name in names or NAMES]


def output(query: Any, key: Any, value: Any, scale: Any = 0.4, **keywords: Any) -> tuple[jax.Array, jax.Array]:
    keywords = {"is_causal": True, "causal_alignment": "bottom_right", "return_residual": True} | keywords
    return attention(query, key, value, scale=scale, **keywords)


def gradients(
    query: Any, key: Any, value: Any, scale: Any, query_lens: Any, key_lens: Any, dout: Any, dlse: Any
) -> tuple[jax.Array, ...]:
    """out, lse, dquery, dkey, dvalue, dscale of a causal call with lengths. Where lse is -inf it becomes 0."""

    def call(*xs: Any) -> tuple[jax.Array, jax.Array]:
        return output(*xs, query_seq_lengths=query_lens, key_value_seq_lengths=key_lens)

    (out, lse), pullback = jax.vjp(call, query, key, value, scale)
    return out, jnp.where(jnp.isneginf(lse), 0, lse), *pullback((dout, dlse))


def assert_close(got: Any, want: Any, dtype: Any = DTYPE) -> None:
    """Equal up to the order of sums, relative to the largest element."""
    got, want, tolerance = jax.tree.leaves(got), jax.tree.leaves(want), TOLERANCE[jnp.dtype(dtype).name]
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        largest = np.abs(y[np.isfinite(y)]).max(initial=1)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of those inside it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"):
                yield from equations(leaf)


def count(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How often each primitive occurs when `function` is traced."""
    names = [str(equation.primitive) for equation in equations(jax.make_jaxpr(function)(*args))]
    return {name: names.count(name) for name in names}


def trace(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Traces call with shapes for arrays, and nothing else: no value exists, nothing runs."""
    shapes = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    rest = {name: x for name, x in arguments.items() if name not in shapes}
    return jax.eval_shape(lambda arrays: call(**arrays, **rest), shapes)


def assert_refused(
    call: Callable[..., Any], arguments: dict[str, Any], exception: type[Exception], words: list[str]
) -> None:
    with pytest.raises(exception) as error:
        trace(call, arguments)
    assert type(error.value) is exception  # not a subclass raised by JAX itself
    assert all(word in str(error.value) for word in words), str(error.value)
