"""Calls at the edge of what is right: empty axes, zero cotangents, x64 mode; and what must hold bit by bit."""

import cases
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import attention

EMPTY = {
    "no batch rows": ((0, 4, 2, 16), (0, 5, 2, 16)),
    "no batch rows, grouped heads": ((0, 4, 6, 16), (0, 5, 2, 16)),
    "a batch axis of none": ((3, 0, 4, 2, 16), (3, 0, 5, 2, 16)),
    "no queries": ((2, 0, 2, 16), (2, 5, 2, 16)),
    "no keys": ((2, 4, 2, 16), (2, 0, 2, 16)),
    "nothing": ((2, 0, 2, 16), (2, 0, 2, 16)),
}


@pytest.mark.parametrize(
    "keywords",
    [{}, {"is_causal": True, "causal_alignment": "bottom_right"}, {"deterministic": True}],
    ids=["", "causal", "deterministic"],
)
@pytest.mark.parametrize(("q_shape", "k_shape"), EMPTY.values(), ids=EMPTY.keys())
def test_empty_axes(q_shape, k_shape, keywords, device):
    with jax.default_device(device):
        q = jnp.full(q_shape, jnp.nan, jnp.bfloat16)  # of no key: never seen
        k, v = jnp.ones(k_shape, jnp.bfloat16), jnp.ones((*k_shape[:-1], 24), jnp.bfloat16)
        scale = jnp.float32(0.5)

        def call(q, k, v, scale):
            return attention(q, k, v, scale=scale, **keywords, return_residual=True)

        (out, lse), pullback = jax.vjp(jax.jit(call), q, k, v, scale)
        assert (out.shape, out.dtype) == ((*q_shape[:-1], 24), jnp.bfloat16)
        assert (lse.shape, lse.dtype) == (q_shape[:-1], jnp.float32)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -jnp.inf)
        gradients = pullback((jnp.full_like(out, jnp.nan), jnp.full_like(lse, jnp.nan)))
        for x, gradient in zip((q, k, v, scale), gradients, strict=True):
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
            np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=str)
def test_vmap_over_nothing(axes, device):
    """The call itself sees no empty axis then, only its primitives do; what is shared has a gradient of 0."""
    with jax.default_device(device):
        x, empty = jnp.ones((2, 5, 4, 16), jnp.bfloat16), jnp.ones((0, 2, 5, 4, 16), jnp.bfloat16)
        q, k = (x if axis is None else empty for axis in axes)
        mapped = jax.vmap(lambda q, k: attention(q, k, k, is_causal=True, return_residual=True), axes)
        (out, lse), pullback = jax.vjp(jax.jit(mapped), q, k)
        assert (out.shape, lse.shape) == (empty.shape, empty.shape[:-1])
        for primal, gradient in zip((q, k), pullback((out, lse)), strict=True):
            np.testing.assert_array_equal(gradient, jnp.zeros_like(primal))


def test_zero_cotangents_give_zero_gradients(backend, dtype):
    """No uninitialised accumulator, no 0 * inf."""
    case = next(case for case in cases.CASES if case.id == "lengths-bottom-right")
    with jax.enable_x64(dtype == "float64"), jax.default_device(jax.devices(backend)[0]):
        arrays = {name: jnp.asarray(x) for name, x in (evaluate.rounded(case.arrays(), dtype) | case.operands).items()}
        cotangents = jnp.zeros_like(arrays.pop("dout")), jnp.zeros_like(arrays.pop("dlse"))
        primals = {name: arrays.pop(name) for name in ("query", "key", "value")}
        result = jax.jit(evaluate.differentiated(attention, dict(case.keywords)))(primals, arrays, cotangents)
        for name in ("dquery", "dkey", "dvalue"):
            np.testing.assert_array_equal(result[name], 0)


@pytest.mark.parametrize(
    "case", [case for case in cases.CASES if case.id in ("deterministic", "gqa")], ids=lambda x: x.id
)
def test_repeatable_bit_by_bit(case, backend, dtype):
    """The forward always; the backward where deterministic is asked for."""
    keywords = dict(case.keywords) | {"deterministic": True}
    with jax.enable_x64(dtype == "float64"), jax.default_device(jax.devices(backend)[0]):
        arrays = {name: jnp.asarray(x) for name, x in evaluate.rounded(case.arrays(), dtype).items()}
        cotangents = arrays.pop("dout"), arrays.pop("dlse")
        run = jax.jit(evaluate.differentiated(attention, keywords))
        first = jax.tree.map(np.asarray, run(arrays, {}, cotangents))
        for _ in range(5):
            jax.tree.map(np.testing.assert_array_equal, run(arrays, {}, cotangents), first)


def test_x64_mode_changes_neither_dtypes_nor_values(rng, device):
    """64-bit defaults must not reach 16-bit or 32-bit arrays, wherever an integer or a float is made inside."""
    arrays = [rng.standard_normal((2, 9, 4, 16)).astype(jnp.bfloat16) for _ in range(3)]
    lengths = np.array([9, 4])  # int64

    def run():
        def loss(q, k, v, scale):
            out, lse = attention(
                q, k, v, scale=scale, is_causal=True, causal_alignment="top_left", key_value_seq_lengths=lengths,
                logits_soft_cap=np.float64(20), local_window_size=np.int64(6), return_residual=True,
            )  # fmt: skip
            assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse))

        with jax.default_device(device):
            return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays, np.float32(0.25))

    plain = run()
    with jax.enable_x64(True):
        wide = run()
    assert [x.dtype for x in wide] == [jnp.bfloat16] * 3 + [jnp.float32]
    jax.tree.map(np.testing.assert_array_equal, wide, plain)


def test_numpy_scale_and_static_scale_agree(rng, device):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 4, 16)), jnp.bfloat16) for _ in range(3))
    with jax.default_device(device):
        static = [attention(q, k, v, scale=s) for s in (0.25, np.float64(0.25), np.array(0.25), None)]
        array = attention(q, k, v, scale=jnp.float32(0.25))
    for out in static[1:]:
        np.testing.assert_array_equal(out, static[0])
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (array, static[0])), atol=2.0**-7)


def test_the_result_has_one_structure_differentiated_or_not(device):
    x = jnp.ones((2, 5, 3, 8), jnp.bfloat16)
    with jax.default_device(device):
        for keywords in ({}, {"return_residual": True}):
            plain = attention(x, x, x, **keywords)
            primal, _ = jax.vjp(lambda x, k=keywords: attention(x, x, x, **k), x)
            assert jax.tree.structure(plain) == jax.tree.structure(primal)
            jax.tree.map(np.testing.assert_array_equal, plain, primal)


@pytest.mark.parametrize("poison", ["nan", "inf", "largest"])
def test_empty_rows_beside_rows_that_overflow(poison, backend, dtype):
    """A row that keeps no key is exactly 0, though the rows of its tile read Inf or NaN, or sum to Inf."""
    with jax.enable_x64(dtype == "float64"), jax.default_device(jax.devices(backend)[0]):
        rng = np.random.default_rng(3)
        q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 2, 16)), dtype) for _ in range(3))
        if poison == "largest":
            v = jnp.full_like(v, jnp.finfo(dtype).max)
        else:
            k, v = k.at[:, 0].set(float(poison)), v.at[:, 1].set(float(poison))
        out, lse = jax.jit(lambda *xs: attention(*xs, query_seq_lengths=3, return_residual=True))(q, k, v)
        np.testing.assert_array_equal(out[:, 3:], 0)
        np.testing.assert_array_equal(lse[:, 3:], -np.inf)
