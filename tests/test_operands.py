"""What acts on each pair of a query and a key, together: every pair of features, and random combinations of them all.

Against the float64 oracle; each operand alone is a row of cases.py.
"""

import inspect
import itertools
import re

import cases
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_flash2 import _api, _checks, _reads, attention, reference

# Each in two dtypes, in turn.
_IN_TURN = list(zip(cases.PAIRS, itertools.cycle([("float32", "bfloat16"), ("float64", "float16")])))


_REMOVING = {"mask", "bias", "query_segment_ids"}


def _checked(**given):
    unset = dict.fromkeys(inspect.signature(_checks.check).parameters) | {"is_causal": False, "dropout_rate": 0.0}
    return _checks.check(**(unset | given))


def _check(case, backend, dtype, slack=1):
    evaluate.skip_what_cuda_lacks(case, backend, dtype)
    got = evaluate.kernel(case, dtype, backend)
    evaluate.check(got, case, dtype, "out", "lse", *evaluate.names(case), slack=slack)
    evaluate.check_zeros(got, case, dtype)


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case, kinds in _IN_TURN for kind in kinds], ids=lambda x: getattr(x, "id", x)
)
def test_pairs(case, kind, backend):
    _check(case, backend, kind)


def test_every_feature_meets_every_other():
    met = {pair for case in cases.PAIRS for pair in itertools.combinations(case.id.split("+"), 2)}
    missing = [(a, b) for a, b in itertools.combinations(cases.FEATURES, 2) if (a, b) not in met]
    assert missing == [("mask", "mask2"), ("bias", "bias2")]
    assert len(cases.PAIRS) < 20


@given(data=st.data())
@settings(max_examples=12, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
def test_random_combinations(data, backend):
    """Any features, shared axes and lengths. A failure prints its arguments, and what reproduces it."""
    draw = data.draw
    T, S, K, G = draw(st.integers(1, 90)), draw(st.integers(1, 150)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    N, batch = K * G, draw(st.sampled_from([(), (1,), (2,), (2, 3)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = draw(
        st.sets(st.sampled_from(sorted({name.rstrip("2") for name in cases.FEATURES} - {"groups"})), min_size=2)
    )

    def shape(*axes):
        return tuple(n if draw(st.booleans()) else 1 for n in (*batch, *axes))

    def lengths(full):
        return rng.integers(0, full + 2, shape()).astype(np.int32)

    keywords, operands = {"causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"]))}, {}
    if "causal" in chosen:
        keywords["is_causal"] = True
    if "window" in chosen:
        keywords["local_window_size"] = draw(st.tuples(*[st.none() | st.integers(0, 60)] * 2))
    if "lengths" in chosen:
        operands |= {"query_seq_lengths": lengths(T), "key_value_seq_lengths": lengths(S)}
    if "soft cap" in chosen:
        keywords["logits_soft_cap"] = 2.5
    if "deterministic" in chosen and not (backend == "cuda" and chosen & {"alibi", "bias"}):  # what CUDA refuses
        keywords["deterministic"] = True
    if "scale" in chosen:
        operands["scale"] = rng.uniform(-0.5, 0.5, shape()).astype(np.float32)
    if "mask" in chosen:
        operands["mask"] = rng.random(shape(N, T, S)) < draw(st.sampled_from([0.1, 0.8]))
    if "segments" in chosen:
        for name, length in (("query_segment_ids", T), ("key_value_segment_ids", S)):
            operands[name] = np.sort(rng.integers(-1, 4, (*shape(), length)), -1)
    if "bias" in chosen:
        bias = rng.standard_normal(shape(N, T, S))
        bias[rng.random(bias.shape) < 0.1] = draw(st.sampled_from([-np.inf, -3e4]))
        operands["bias"] = bias.astype(draw(st.sampled_from(["float32", "float16", jnp.bfloat16])))
    if "alibi" in chosen:
        operands["alibi_slopes"] = (rng.standard_normal(shape(N)) / 8).astype(np.float32)
    if "sinks" in chosen:
        operands["sinks"] = rng.standard_normal(shape(N)).astype(np.float32)
    if "dropout" in chosen and T * S * N * np.prod(batch) < 40_000:  # the oracle takes its time
        keywords["dropout_rate"], operands["dropout_rng"] = 0.3, rng.integers(0, 2**32, 2, np.uint32)
    D, Dv = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    case = cases.Case(f"random-{draw(st.integers(0, 99))}", "any", T, S, N, K, D, Dv, batch, keywords, operands)
    # The bound is measured by an array's largest element, and one of a few sums may be much smaller than its terms.
    _check(case, backend, draw(st.sampled_from(evaluate.DTYPES)), slack=8)


# Dropout.


@pytest.fixture
def xs(rng):
    return [jnp.asarray(rng.standard_normal((2, n, 4, 8)), jnp.float32) for n in (150, 300, 300)]


pytestmark = pytest.mark.usefixtures("on_cpu")


def test_dropout_keeps_the_expected_share_of_each_head():
    rate, S = 0.3, 200
    q, k, v = jnp.zeros((3, 96, 4, 8)), jnp.zeros((3, S, 4, 8)), jnp.ones((3, S, 4, 8))
    call = jax.jit(lambda key: attention(q, k, v, dropout_rate=rate, dropout_rng=key)[..., 0])
    outs = np.stack([call(jax.random.key(seed)) for seed in range(3)])
    kept = outs * (1 - rate) * S  # how many keys each query kept
    np.testing.assert_allclose(kept, kept.round(), atol=1e-3)
    spread = np.sqrt(rate * (1 - rate) / (96 * S))
    assert np.abs(kept.mean(2) / S - (1 - rate)).max() < 5 * spread  # seed, batch row and head alone
    assert abs(kept.mean() / S - (1 - rate)) < 4 * spread / np.sqrt(36)
    assert len({row.tobytes() for row in outs.transpose(0, 1, 3, 2).reshape(-1, 96)}) == 36


def test_dropout_of_a_part_is_that_part_of_the_whole(xs):
    """Keep decisions depend on positions alone, not on what a tile or a call has beside them."""
    q, k, v = xs
    call = jax.jit(lambda q, k, v: attention(q, k, v, dropout_rate=0.5, dropout_rng=jax.random.key(0)))
    np.testing.assert_allclose(call(q[:, :67], k, v), call(q, k, v)[:, :67], atol=1e-6)
    padded = [jnp.pad(x, [(0, 0), (0, 9), (0, 0), (0, 0)], constant_values=jnp.nan) for x in (k, v)]
    lengths = {"key_value_seq_lengths": 300}
    more = attention(q, *padded, dropout_rate=0.5, dropout_rng=jax.random.key(0), **lengths)
    np.testing.assert_allclose(more, call(q, k, v), atol=1e-6)


def test_dropout_is_that_of_the_reference_also_when_it_is_computed_again(xs):
    """Under jax.checkpoint, and for gradients: what the forward dropped, the backward drops."""

    def gradients(call):
        def loss(q, k, v, key):
            return jnp.sum(jnp.sin(call(q, k, v, dropout_rate=0.4, dropout_rng=key)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    key = jax.random.key(5)
    plain = gradients(attention)(*xs, key)
    again = gradients(_remat)(*xs, key)
    want = gradients(reference.attention)(*xs, key)
    for a, b, c in zip(plain, again, want, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=2e-5)


def _remat(q, k, v, dropout_rate, dropout_rng):
    call = jax.checkpoint(lambda q, k, v, key: attention(q, k, v, dropout_rate=dropout_rate, dropout_rng=key))
    return call(q, k, v, dropout_rng)


def test_no_dropout_is_bitwise_nothing(xs):
    call = jax.jit(attention)
    np.testing.assert_array_equal(call(*xs, dropout_rng=jax.random.key(0)), call(*xs))


# What the CUDA kernels are given zeros for; that they need no more is tested on a GPU.


@pytest.mark.parametrize(
    "case", [case for case in cases.ALL + cases.PAIRS if _REMOVING & set(case.operands)], ids=lambda case: case.id
)
def test_what_nobody_reads_is_cleared(case):
    """By the rules of the reference: queries and cotangents of rows without keys, keys and values without a reader."""
    arrays = {name: jnp.asarray(x) for name, x in (case.arrays() | dict(case.operands)).items() if name != "dlse"}
    dout = arrays.pop("dout")
    keywords = {n: x for n, x in case.keywords.items() if n not in ("deterministic", "dropout_rate")}
    arrays.pop("dropout_rng", None)
    call = _checked(**arrays, **keywords)
    keep = np.asarray(reference._keep(call))
    extras, spec = _api._extras(call), _api._spec(call, deterministic=False)
    xs = {"q": call.query, "k": call.key, "v": call.value, "dout": dout}
    operands = xs | {name: x for name, x in extras._asdict().items() if x is not None}
    got = dict(zip(operands, _reads.cleared(list(operands), list(operands.values()), spec), strict=True))
    reads = np.swapaxes(keep.any(-1), -1, -2)[..., None]
    read = keep.any(-2).reshape(*case.batch, case.K, case.N // case.K, case.S).any(-2)
    read = np.swapaxes(read, -1, -2)[..., None]
    for name, alive in (("q", reads), ("dout", reads), ("k", read), ("v", read)):
        np.testing.assert_array_equal(got[name], np.where(alive, xs[name], 0), err_msg=name)
    for name in set(operands) - set(xs):
        assert got[name] is operands[name]


# Operands as they are.


def test_a_shared_bias_is_read_in_place(xs):
    """No array of the program is as large as the scores, nor as the bias would be for every batch row and head."""
    bias = jnp.ones((1, 1, 150, 300))

    def loss(q, k, v, bias):
        return jnp.sum(jnp.sin(attention(q, k, v, bias)))

    text = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*xs, bias).compile().as_text()
    assert "[1,1,150,300]" in text
    assert not any(shape in text for shape in ("[2,4,150,300]", "[2,1,150,300]", "[1,4,150,300]"))


@pytest.mark.parametrize("argnums", [(0, 1, 2), (0, 1, 2, 3)], ids=["q, k, v", "bias too"])
def test_a_shared_bias_is_read_in_place_on_cuda(xs, argnums):
    """No number of the program stands for a pair but the bias itself, once; what compares it is fused."""
    bias = jnp.ones((1, 1, 150, 300), jnp.bfloat16)
    xs = [x.astype(jnp.bfloat16) for x in xs]

    def loss(q, k, v, bias):
        return jnp.sum(jnp.sin(attention(q, k, v, bias).astype(jnp.float32)))

    for function in (loss, jax.grad(loss, argnums)):
        text = jax.jit(function).trace(*xs, bias).lower(lowering_platforms=("cuda",)).as_text()
        pairs = set(re.findall(r"tensor<([\dx]*150x300x[a-hj-z]+\d+)>", text))  # of any type but i1 and integers
        assert pairs <= {"1x1x150x300xbf16", "1x1x150x300xf32"}


def test_a_causal_mask_is_causal(xs):
    q = xs[1]
    mask = jnp.tri(300, dtype=bool)[None, None]
    np.testing.assert_allclose(attention(q, *xs[1:], mask=mask), attention(q, *xs[1:], is_causal=True), atol=1e-6)


def test_second_derivatives_are_refused_by_name(xs):
    def loss(q, **keywords):
        return jnp.sum(jnp.sin(attention(q, *xs[1:], **keywords)))

    for name, operand in (("bias", jnp.ones((1, 1, 150, 300))), ("mask", jnp.ones((1, 1, 150, 300), bool))):
        with pytest.raises(NotImplementedError, match=rf"attention with {name} has first derivatives.*'reference'"):
            jax.hessian(loss)(xs[0], **{name: operand})
