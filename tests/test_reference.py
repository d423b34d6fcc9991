"""jax_flash2.reference against the NumPy oracle: every keyword, every case; and dropout against its definition."""

import functools
import itertools

import cases
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_flash2 import reference

# Each case in one dtype, in turn: a compilation takes a second. What only tiles can get wrong is left out.
LAWS = [case for case in cases.OPERAND_CASES + cases.CASES if not case.id.startswith(("tiles-", "dim-"))]
IN_TURN = list(zip(LAWS, itertools.cycle(evaluate.DTYPES)))
ALL_DTYPES = [(case, dtype) for case in LAWS if case.id == "everything" for dtype in evaluate.DTYPES]


@pytest.mark.parametrize(("case", "dtype"), dict.fromkeys(IN_TURN + ALL_DTYPES), ids=lambda x: getattr(x, "id", x))
def test_reference(case, dtype):
    got = evaluate.jax_reference(case, dtype)
    evaluate.check(got, case, dtype, "out", "lse", *evaluate.names(case))
    evaluate.check_zeros(got, case, dtype)


# From the known-answer file of the Random123 library.
PHILOX = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX)
def test_philox_known_answers(counter, key, words):
    counter_words, key_words = [jnp.uint32(x) for x in counter], [jnp.uint32(x) for x in key]
    assert tuple(map(int, jax.jit(reference.philox4x32_7)(counter_words, key_words))) == words
    assert oracle.philox4x32_7(counter, key) == words


def test_dropout_words_of_one_block():
    """The layout by hand: the block of (17, 34) serves rows 17 and 25, columns 34 and 42."""
    words = jax.jit(reference.dropout_words, static_argnums=(1, 2))(jnp.asarray([[5, 6], [7, 8]], jnp.uint32), 30, 50)
    assert words.shape == (2, 30, 50)
    block = oracle.philox4x32_7((17, 34, 0, 0), (7, 8))
    assert [int(words[1, i, j]) for i, j in ((17, 34), (17, 42), (25, 34), (25, 42))] == list(block)


def test_dropout_keeps_the_expected_share_and_the_mean():
    shape = (2, 64, 3, 8)
    q, k, v = jnp.zeros(shape), jnp.zeros(shape), jnp.ones(shape)
    rate = 0.3
    call = jax.jit(lambda key: reference.attention(q, k, v, dropout_rate=rate, dropout_rng=key)[..., 0])
    outs = np.stack([call(jax.random.key(seed)) for seed in range(4)])
    kept = outs * (1 - rate) * 64  # how many of 64 keys each query kept
    np.testing.assert_allclose(kept, kept.round(), atol=1e-4)
    elements = outs.size * 64
    assert abs(kept.sum() / elements - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / elements)
    assert len({row.tobytes() for row in outs.transpose(0, 1, 3, 2).reshape(-1, 64)}) == 4 * 2 * 3  # all seeds differ


def test_no_dropout_is_bitwise_nothing(rng):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 3, 4)), jnp.float32) for _ in range(3))
    call = jax.jit(reference.attention)
    np.testing.assert_array_equal(call(q, k, v, dropout_rng=jax.random.key(0)), call(q, k, v))


def test_dropout_of_a_rate_that_rounds_to_one_drops_everything():
    x = jnp.ones((2, 9, 3, 4))
    call = jax.jit(functools.partial(reference.attention, dropout_rate=1 - 2.0**-40))
    out = call(x, x, x, dropout_rng=jax.random.key(0))
    np.testing.assert_array_equal(out, 0)


def test_float64_lowest_bias_is_a_number_for_float32_scores():
    with jax.enable_x64(True):
        q, k = jnp.ones((2, 3, 4, 8), jnp.float32), jnp.ones((2, 5, 4, 8), jnp.float32)
        v = jnp.arange(2 * 5 * 4 * 8, dtype=jnp.float32).reshape(k.shape)
        bias = jnp.full((1, 1, 3, 5), jnp.finfo(jnp.float64).min)
        out = jax.jit(reference.attention)(q, k, v, bias)
        np.testing.assert_allclose(out, np.broadcast_to(v.mean(1, keepdims=True), q.shape), rtol=1e-6)


def test_flat_rows_longer_than_float16_can_count():
    """1 / S is below the smallest normal float16: normalised probabilities would be rounded to nothing."""
    S = 40_000
    q, k, v = (jnp.ones((1, length, 1, 2), jnp.float16) for length in (1, S, S))
    np.testing.assert_allclose(np.asarray(jax.jit(reference.attention)(q, k, v), np.float32), 1, rtol=1e-3)


def test_second_derivatives(rng):
    """A derivative of the gradient along a direction equals the difference of the oracle's gradients."""
    shapes = {"query": (1, 3, 2, 4), "key": (1, 5, 1, 4), "value": (1, 5, 1, 4)}
    x, t = ({name: rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(2))
    dout, dlse = rng.standard_normal(shapes["query"]), rng.standard_normal((1, 3, 2))
    keywords = {"is_causal": True, "causal_alignment": "bottom_right", "logits_soft_cap": 2.0}

    def oracle_gradients(step):
        result = oracle.attention(**{n: x[n] + step * t[n] for n in x}, dout=dout, dlse=dlse, **keywords)
        return {name: result[f"d{name}"] for name in x}

    def loss(x):
        out, lse = reference.attention(**x, **keywords, return_residual=True)
        return (out * dout).sum() + (lse * dlse).sum()

    with jax.enable_x64(True):
        _, got = jax.jit(lambda x, t: jax.jvp(jax.grad(loss), (x,), (t,)))(x, t)
    step = 1e-5
    want = jax.tree.map(lambda a, b: (a - b) / (2 * step), oracle_gradients(step), oracle_gradients(-step))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), got, want)
