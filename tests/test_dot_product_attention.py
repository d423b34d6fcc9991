"""dot_product_attention is jax.nn's on our kernels: same signature, shapes and values, but for two stated points."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import dot_product_attention

B, T, S, N, K, D = 3, 7, 9, 4, 2, 8


def arrays(rng, batch=(B,), T=T, S=S):
    shapes = (*batch, T, N, D), (*batch, S, K, D), (*batch, S, K, D)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def test_signature():
    ours, theirs = (inspect.signature(f).parameters for f in (dot_product_attention, jax.nn.dot_product_attention))
    described = {name: (p.kind, p.default) for name, p in ours.items()}
    assert theirs.keys() <= described.keys()
    assert {name: described[name] for name in theirs} == {name: (p.kind, p.default) for name, p in theirs.items()}


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"scale": 0.7},
        {"is_causal": True},
        # Some versions of jax.nn forget a window that comes alone.
        {"local_window_size": 2, "query_seq_lengths": np.array([7, 7, 7], np.int32)},
        {"local_window_size": (4, 1), "is_causal": True},
        {"key_value_seq_lengths": np.array([9, 1, 4], np.int32)},
    ],
    ids=str,
)
def test_equals_jax_nn(rng, keywords):
    """Out and gradients, where no row is empty."""
    with jax.default_device(jax.devices("cpu")[0]):
        xs, dout = arrays(rng), jnp.asarray(rng.standard_normal((B, T, N, D)), jnp.float32)

        def run(call):
            out, pullback = jax.vjp(lambda *xs: call(*xs, **keywords), *xs)
            return out, *pullback(dout)

        for got, want in zip(jax.jit(run, static_argnums=0)(dot_product_attention),
                             jax.jit(run, static_argnums=0)(jax.nn.dot_product_attention), strict=True):  # fmt: skip
            np.testing.assert_allclose(got, want, atol=3e-6)


def test_without_a_batch(rng):
    with jax.default_device(jax.devices("cpu")[0]):
        xs = arrays(rng, batch=())
        keywords = {"is_causal": True, "key_value_seq_lengths": jnp.asarray([5], jnp.int32)}
        got = dot_product_attention(*xs, **keywords)
        want = jax.nn.dot_product_attention(*xs, **keywords)
        assert got.shape == want.shape == (T, N, D)
        np.testing.assert_allclose(got, want, atol=3e-6)
        out, lse = dot_product_attention(*xs, **keywords, return_residual=True)
        np.testing.assert_array_equal(out, got)
        assert lse.shape == (T, N)


@pytest.mark.parametrize("shape", [(B, 1, T, S), (N, T, S), (S,)])
def test_bias_and_mask_of_jax_nn(rng, shape):
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU multiplies in less than float32
        xs = arrays(rng)
        bias = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        mask = jnp.asarray(rng.random(shape) > 0.3).at[..., 0].set(True)
        got = jax.jit(lambda *xs: dot_product_attention(*xs, bias, mask))(*xs)
        want = jax.jit(lambda *xs: jax.nn.dot_product_attention(*xs, bias, mask))(*xs)
        np.testing.assert_allclose(got, want, atol=3e-6)


def test_empty_rows_give_zero(rng, device):
    """The first documented difference; the second is that lse is float32 and has a gradient."""
    with jax.default_device(device):
        xs = [x.astype(jnp.bfloat16) for x in arrays(rng)]
        lengths = jnp.asarray([9, 0, 4], jnp.int32)

        def lse_sum(*xs):
            out, lse = dot_product_attention(*xs, key_value_seq_lengths=lengths, return_residual=True)
            return jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse)), (out, lse)

        dquery, (out, lse) = jax.jit(jax.grad(lse_sum, has_aux=True))(*xs)
        np.testing.assert_array_equal(out[1], 0)
        np.testing.assert_array_equal(lse[1], -jnp.inf)
        assert lse.dtype == jnp.float32
        assert float(jnp.abs(dquery[0].astype(jnp.float32)).max()) > 0
        np.testing.assert_array_equal(dquery[1], 0)


def test_other_ranks_are_refused():
    for batch in ((2, 2), None):
        x = jnp.ones((5, 8)) if batch is None else jnp.ones((*batch, 5, 4, 8))
        with pytest.raises(ValueError, match=r"query has shape .*\[B, length, heads, D\]"):
            dot_product_attention(x, x, x)
