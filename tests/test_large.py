"""Arrays of more elements than 32 bits count, and what else shows on a GPU only. Sampled rows are compared.

Runs where there is a GPU with the memory; leave it out elsewhere with -m "not large".
"""

import os
import subprocess
import sys
import textwrap

import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_flash2 import attention
from jax_flash2.testing import assert_accurate

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif("cuda" not in evaluate.BACKENDS, reason="needs a GPU"),
]


def normal(seed, shape, dtype, factor=1.0):
    """Random on the GPU, without a temporary wider than the array: 16 random bits an element."""
    bits = jax.random.bits(jax.random.key(seed, impl="rbg"), shape, jnp.uint16)
    return jax.jit(
        lambda b: b.astype(jnp.int16).astype(dtype) * jnp.asarray(factor * 2.0**-14, dtype), donate_argnums=0
    )(bits)


def host(*arrays):
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in arrays]


def test_backward_workspace_past_32_bits():
    """15000 x 12 x 128 x 96 elements of dq in float32: 2.2e9."""
    shape_q, shape_k = (15_000, 128, 12, 96), (15_000, 16, 12, 96)
    q, dout = (normal(seed, shape_q, jnp.bfloat16) for seed in (0, 1))
    k, v = (normal(seed, shape_k, jnp.bfloat16) for seed in (2, 3))
    gradients = jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout))(q, k, v, dout)
    for b in (0, 7_000, 11_650, 14_999):  # 11651 rows fill 2**31 elements less a little
        want = oracle.attention(*host(*(x[b : b + 1] for x in (q, k, v, dout))), np.zeros((1, 128, 12)))
        for got, name in zip(gradients, ("dquery", "dkey", "dvalue"), strict=True):
            assert_accurate(host(got[b : b + 1])[0], want[name], want[name], "bfloat16", f"{name} of row {b}")


def test_one_sequence_past_32_bits():
    """352256 x 48 x 128 elements a tensor: row 349525 begins at 2**31."""
    T, N, D, left = 352_256, 48, 128, 128
    q, k, v = (normal(seed, (1, T, N, D), jnp.bfloat16) for seed in range(3))
    call = jax.jit(lambda *xs: attention(*xs, is_causal=True, local_window_size=(left, 0), return_residual=True))
    out, lse = call(q, k, v)
    for i in (0, 129, 349_524, 349_525, 349_526, T - 1):
        first = max(0, i - left)
        for n in (0, N - 1):
            xs = host(q[:, i : i + 1, n : n + 1], *(x[:, first : i + 1, n : n + 1] for x in (k, v)))
            want = oracle.attention(*xs, np.zeros((1, 1, 1, D)), np.zeros((1, 1, 1)))
            got_out, got_lse = host(out[:, i : i + 1, n : n + 1], lse[:, i : i + 1, n : n + 1])
            assert_accurate(got_out, want["out"], want["out"], "bfloat16", f"out of row {i}, head {n}")
            assert_accurate(got_lse, want["lse"], want["lse"], "float32", f"lse of row {i}, head {n}")


def test_batch_stride_of_two_to_the_thirty():
    """A cache whose batch rows lie 2**30 elements apart: each row must read its own."""
    B, T, S, N, D = 5, 3, 262_144, 32, 128
    k = normal(0, (B, S, N, D), jnp.float16)
    v = jnp.broadcast_to(jnp.arange(B, dtype=jnp.float16)[:, None, None, None], k.shape)
    q = normal(1, (B, T, N, D), jnp.float16)
    lengths = jnp.asarray([3, 70_000, 5, S, 9], jnp.int32)

    @jax.jit
    def call(q, k, v):
        return attention(
            q,
            k,
            v,
            is_causal=True,
            causal_alignment="bottom_right",
            key_value_seq_lengths=lengths,
            return_residual=True,
        )

    out, lse = call(q, k, v)
    np.testing.assert_allclose(host(out)[0], np.broadcast_to(np.arange(B)[:, None, None, None], out.shape), rtol=2e-3)
    for b, length in enumerate((3, 70_000, 5, S, 9)):
        xs = host(*(x[b : b + 1, :, :1] for x in (q, k[:, :length], v[:, :length])))
        zeros = np.zeros((1, T, 1, D)), np.zeros((1, T, 1))
        want = oracle.attention(*xs, *zeros, is_causal=True, causal_alignment="bottom_right")
        assert_accurate(host(lse[b : b + 1, :, :1])[0], want["lse"], want["lse"], "float32", f"lse of row {b}")


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads"),
    [(300, 2048, 128, 1), (16, 1100, 1100, 8), (1, 2100, 9000, 16)],
    ids=["few keys", "chores of lists", "chores of drawn tiles"],
)
def test_the_same_residuals_give_the_same_gradients(batch, queries, keys, heads):
    """Large values, run after run: a race shows as a rare difference."""
    shape_q, shape_k = (batch, queries, heads, 128), (batch, keys, heads, 128)
    q, dout = (normal(seed, shape_q, jnp.float16, 3) for seed in (0, 1))
    k, v = (normal(seed, shape_k, jnp.float16, 3) for seed in (2, 3))
    _, pullback = jax.vjp(jax.jit(attention), q, k, v)
    pullback = jax.jit(pullback)
    first = host(*pullback(dout))
    for b, n in ((0, 0), (batch - 1, heads - 1)):
        at = np.s_[b : b + 1, :, n : n + 1]
        want = oracle.attention(*host(*(x[at] for x in (q, k, v, dout))), np.zeros((1, queries, 1)))
        for got, name in zip(first, ("dquery", "dkey", "dvalue"), strict=True):
            assert_accurate(got[at], want[name], want[name], "float16", f"{name} of row {b}, head {n}")
    for _ in range(50):
        for got, want in zip(host(*pullback(dout)), first, strict=True):
            assert np.abs(got - want).max() <= 2 * 2.0**-10 * np.abs(want).max()


CAPTURED = """
    import hashlib, jax, jax.numpy as jnp, numpy as np
    from jax_flash2 import attention
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 128, 4, 64)), jnp.bfloat16) for _ in range(3))
    step = lambda x, _: (attention(x, k, v, is_causal=True), None)
    run = jax.jit(lambda x: jax.lax.scan(step, x, length=32)[0])
    for _ in range(3):
        out = np.asarray(run(q).astype(jnp.float32))
    print(hashlib.sha256(out.tobytes()).hexdigest())
"""


def test_command_buffers_change_no_bit():
    """A scan of 32 calls, captured as a CUDA graph and not."""
    digests = []
    for flags in (
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
    ):
        environment = os.environ | {"XLA_FLAGS": flags}
        done = subprocess.run(
            [sys.executable, "-P", "-c", textwrap.dedent(CAPTURED)],
            env=environment, check=True, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        digests.append(done.stdout.split()[-1])
    assert digests[0] == digests[1]
