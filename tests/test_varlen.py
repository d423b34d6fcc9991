"""varlen_attention against the float64 oracle, sequence by sequence; and what must hold of a pack beside."""

import functools
import itertools
import pathlib

import calls
import cases
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import packs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_flash2 import _checks, _packing, attention, varlen_attention

# Each in two dtypes, in turn.
_IN_TURN = list(zip(packs.PACKS, itertools.cycle([("float32", "bfloat16"), ("float64", "float16")])))
BOUNDS = {"max_seqlen_q": 1, "max_seqlen_k": 1}


def _arrays(rng, T, S, N, K, D, dtype="bfloat16"):
    shapes = (T, N, D), (S, K, D), (S, K, D)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.fixture
def on_device(device):
    with jax.default_device(device):
        yield


def _check(pack, dtype, backend):
    evaluate.skip_what_cuda_lacks(pack, backend, dtype)
    packs.check(packs.run(varlen_attention, pack, dtype, backend, implementation=backend), pack, dtype)


@pytest.mark.parametrize(
    ("pack", "kind"), [(pack, kind) for pack, kinds in _IN_TURN for kind in kinds], ids=lambda x: getattr(x, "id", x)
)
def test_packs(pack, kind, backend):
    _check(pack, kind, backend)


_LAWS = [pack for pack in packs.PACKS if not pack.id.startswith(("long", "dims", "deterministic", "whole"))]


@pytest.mark.parametrize("pack", _LAWS, ids=lambda pack: pack.id)
def test_reference(pack):
    options = {"xla_backend_optimization_level": 0}
    packs.check(
        packs.run(varlen_attention, pack, "float32", "cpu", options, implementation="reference"), pack, "float32"
    )


@given(data=st.data())
@settings(max_examples=10, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
def test_random_packs(data):
    """Any layout and features. A failure prints its arguments, and what reproduces it."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    B, largest = draw(st.integers(1, 12)), draw(st.sampled_from([3, 20, 90]))
    queries, keys = (rng.integers(0, largest + 1, B) * (rng.random(B) < 0.8) for _ in range(2))
    # One of them is never tiny, and heads are several: the bound on errors is relative to the largest element.
    queries[-1], keys[-1] = queries[-1] + 9, keys[-1] + 9
    sides = [tuple(map(int, x)) for x in (queries, keys)]
    used = [
        (*map(int, rng.integers(0, x[:-1] + 1)), int(x[-1])) if draw(st.booleans()) else None for x in (queries, keys)
    ]
    around = [tuple(map(int, rng.integers(0, 9, 2))) if draw(st.booleans()) else (0, 0) for _ in range(2)]
    K, G = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    keywords, operands = {"causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"]))}, {}
    if draw(st.booleans()):
        keywords["is_causal"] = True
    if draw(st.booleans()):
        keywords["local_window_size"] = draw(st.tuples(*[st.none() | st.integers(0, 40)] * 2))
    if draw(st.booleans()):
        keywords["logits_soft_cap"] = 2.5
    if draw(st.booleans()):
        operands["alibi_slopes"] = (rng.standard_normal(K * G) / 8).astype(np.float32)
    if draw(st.booleans()):
        operands["sinks"] = rng.standard_normal(K * G).astype(np.float32)
    if draw(st.booleans()) and np.sum(queries * keys) * K * G < 20_000:  # the oracle takes its time
        keywords["dropout_rate"], operands["dropout_rng"] = 0.3, rng.integers(0, 2**32, 2, np.uint32)
    pack = packs.Pack(
        f"random-{draw(st.integers(0, 99))}", "any", *sides, K * G, K, draw(st.integers(1, 40)),
        draw(st.integers(1, 24)), *used, *around, keywords, operands,
    )  # fmt: skip
    _check(pack, draw(st.sampled_from(evaluate.DTYPES)), "cpu")


# Where sequences lie.


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 1), (0, None)], ids=str)
@pytest.mark.parametrize("bottom_right", [False, True], ids=["top left", "bottom right"])
@pytest.mark.parametrize(("T", "S", "B", "packs_"), [(24, 21, 5, 60), (97, 83, 40, 12)], ids=["few", "many"])
def test_spans_are_the_mask(rng, window, bottom_right, T, S, B, packs_):
    """Row by row and column by column the same mask, drawn pair by pair here; ends that never decrease."""
    starts = [np.sort(rng.integers(0, n + 1, (packs_, B + 1)), -1) for n in (T, S)]
    for x, n in zip(starts, (T, S), strict=True):
        x[::2, 0], x[::2, -1] = 0, n  # of these packs all rows may take part
    lengths = [rng.integers(0, np.diff(x) + 1) if i else np.diff(x) for i, x in enumerate(starts)]
    lengths[1][::2] = np.diff(starts[1][::2])
    packing = _checks.Packing(*(jnp.asarray(x, jnp.int32) for x in (*starts, *lengths)))
    make = functools.partial(_packing.packed, queries=T, keys=S, window=window, bottom_right=bottom_right)
    key_spans, query_spans, flags, positions = map(np.asarray, jax.vmap(make)(packing))
    assert {*flags} == {1, 3} or window != (None, None) or B > 5
    for x in range(packs_):
        keep = np.zeros((T, S), bool)
        for i0, j0, t, s in zip(*(side[x, :B] for side in (*starts, *lengths)), strict=True):
            off = s - t if bottom_right else 0
            np.testing.assert_array_equal(positions[x, i0 : i0 + t], j0 + np.arange(t) + off)
            i, j = np.arange(t)[:, None] + off, np.arange(s)
            left, right = (np.inf if side is None else side for side in window)
            keep[i0 : i0 + t, j0 : j0 + s] = (j >= i - left) & (j <= i + right)
        np.testing.assert_array_equal(_drawn(key_spans[x], S), keep)
        np.testing.assert_array_equal(_drawn(query_spans[x], T), keep.T)
        assert flags[x] == (3 if keep.any(0).all() and keep.any(1).all() else 1)


def test_the_kernel_takes_as_many_sequences_as_it_is_given():
    header = (pathlib.Path(__file__).parent.parent / "src/cuda/packs.h").read_text()
    assert f"kMostSequences = {_packing._MOST_SEQUENCES};" in header


@pytest.mark.parametrize(("sequences", "kernels"), [(1, 1), (1023, 1), (1024, 0)])
def test_on_a_gpu_one_kernel_makes_spans(sequences, kernels):
    packing = _checks.Packing(jax.ShapeDtypeStruct((sequences + 1,), jnp.int32), None, None, None)
    make = functools.partial(_packing.packed, queries=64, keys=64, window=(None, 0), bottom_right=False)
    text = jax.jit(make).trace(packing).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"custom_call @{_packing.PACKS_TARGET}") == kernels


def _numbers(rng, T, S, B):
    """Packings of any numbers."""
    right = [np.sort(rng.integers(0, n + 1, B + 1)) for n in (T, S)]
    wrong = [rng.integers(-50, n + 60, B + 1) for n in (T, S)]
    used = [rng.integers(-2, n + 3, B) for n in (T, S)]
    for packing in (
        (*right, None, None),
        (*wrong, *used),
        (*right, None, used[1]),
        (wrong[0], None, None, None),
        (right[0], None, used[0], None),
        (np.linspace(0, T, B + 1), None, None, None),
    ):
        yield _checks.Packing(*(None if x is None else np.asarray(x, np.int32) for x in packing))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("T", "S", "B"), [(97, 83, 40), (5000, 4000, 1023), (0, 5, 2), (300, 300, 7)], ids=str)
@pytest.mark.parametrize(("window", "bottom_right"), [((None, 0), True), ((3, 1), False)], ids=str)
def test_spans_of_any_numbers(rng, T, S, B, window, bottom_right):
    """Drawn pair by pair here. Of wrong starts right ones are made, and what is used of a sequence lies within it."""
    make = jax.jit(functools.partial(_packing.packed, queries=T, keys=S, window=window, bottom_right=bottom_right))
    for packing in _numbers(rng, T, S, B):
        key_spans, query_spans, flags, positions = map(np.asarray, make(packing))
        one = packing.key_starts is None
        q_starts = np.maximum.accumulate(np.clip(packing.query_starts, 0, min(T, S) if one else T))
        k_starts = q_starts if one else np.maximum.accumulate(np.clip(packing.key_starts, 0, S))
        q_lens, k_lens = (
            np.diff(starts) if used is None else np.clip(used, 0, np.diff(starts))
            for starts, used in ((q_starts, packing.query_used), (k_starts, packing.key_used))
        )
        before, after = (T + S if side is None else side for side in window)
        keep = np.zeros((T, S), bool)
        for i0, j0, t, s in zip(q_starts, k_starts, q_lens, k_lens, strict=False):
            i, j = np.arange(t) + (s - t if bottom_right else 0), np.arange(s)
            keep[i0 : i0 + t, j0 : j0 + s] = (j >= i[:, None] - before) & (j <= i[:, None] + after)
            np.testing.assert_array_equal(positions[i0 : i0 + t], j0 + i)
        np.testing.assert_array_equal(_drawn(key_spans, S), keep)
        np.testing.assert_array_equal(_drawn(query_spans, T), keep.T)
        assert flags == (3 if keep.any(0).all() and keep.any(1).all() else 1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("sequences", [31, 32, 63, 600])
def test_spans_take_a_few_numbers_a_row(sequences):
    """As XLA plans it for the CPU, which keeps what it compares where a row is compared with many."""
    size = 8192
    starts, lengths = (jax.ShapeDtypeStruct((sequences + n,), jnp.int32) for n in (1, 0))
    make = functools.partial(_packing.packed, queries=size, keys=size, window=(None, 0), bottom_right=False)
    memory = jax.jit(make).lower(_checks.Packing(starts, starts, lengths, lengths)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 40 * 2 * size


def _drawn(spans, size):
    """bool [rows, size]; and what src/core/spec.h demands of the ends."""
    begin, end = np.where(spans[:, 0] < 0, ~spans[:, 0], spans[:, 0]), spans[:, 1]
    for x in (begin, end):
        assert ((np.diff(x) >= 0) & (x[:-1] >= 0) & (x[1:] <= size)).all()
    x = np.arange(size)
    return (spans[:, :1] >= 0) & (spans[:, :1] <= x) & (x < spans[:, 1:])


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("integer", ["int8", "uint32", "int64"])
def test_wrong_starts_are_safe(rng, integer, array):
    """Negative, past the end, decreasing: only rows are read that exist, and every result is a number."""
    info = np.iinfo(integer)
    q, k, v = (jnp.asarray(rng.standard_normal((n, 2, 16)), jnp.bfloat16) for n in (70, 150, 150))

    @jax.jit
    def run(*numbers):
        def call(q, k, v):
            starts, used = numbers[:2], dict(zip(("seqused_q", "seqused_k"), numbers[2:], strict=True))
            return varlen_attention(q, k, v, *starts, **used, **BOUNDS, **packs.BR, return_residual=True)

        (out, lse), pullback = jax.vjp(call, q, k, v)
        return out, jnp.where(jnp.isneginf(lse), 0, lse), *pullback((out, jnp.ones_like(lse)))

    for _ in range(20):
        some = [info.min, info.max, 0, 60, 9, 99]
        numbers = [array(rng.choice(some, size).astype(integer)) for size in (7, 7, 6, 6)]
        with jax.enable_x64(integer == "int64"):
            assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in run(*numbers))


@pytest.mark.usefixtures("on_device")
def test_one_program_serves_all_contents(rng):
    q, k, v = _arrays(rng, 36, 36, 4, 2, 16)

    def call(q, k, v, cu, implementation=None):
        return varlen_attention(q, k, v, cu, cu, **BOUNDS, is_causal=True, implementation=implementation)

    plain, reference = jax.jit(call), jax.jit(functools.partial(call, implementation="reference"))
    for lengths in ([5, 0, 20, 11], [1, 30, 2, 3], [0, 0, 0, 36], [9, 9, 9, 9]):
        cu = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
        calls.assert_close(plain(q, k, v, cu), reference(q, k, v, cu), jnp.bfloat16)
    assert plain._cache_size() == 1


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("keywords", [{}, packs.TL, packs.BR, {"local_window_size": (9, 4), **cases.TOP_LEFT}], ids=str)
def test_equal_lengths_are_a_batch(rng, keywords):
    B, T, S = 3, 40, 70
    q, k, v = _arrays(rng, B * T, B * S, 4, 2, 16)
    dout, *_ = _arrays(rng, B * T, 0, 4, 2, 16)
    cu_q, cu_k = (jnp.arange(0, B * n + 1, n) for n in (T, S))

    def packed(q, k, v):
        return varlen_attention(q, k, v, cu_q, cu_k, **BOUNDS, **keywords)

    def batched(q, k, v):
        q, k, v = (x.reshape(B, -1, *x.shape[1:]) for x in (q, k, v))
        return attention(q, k, v, **keywords).reshape(B * T, 4, 16)

    got, want = ((lambda out, pull: (out, *pull(dout)))(*jax.vjp(jax.jit(f), q, k, v)) for f in (packed, batched))
    calls.assert_close(got, want, jnp.bfloat16)


@pytest.mark.usefixtures("on_device")
def test_numbers_of_lengths_change_nothing(rng):
    q, k, v = _arrays(rng, 30, 30, 2, 2, 16)
    cu = jnp.asarray([0, 11, 30])
    first, *others = (
        varlen_attention(q, k, v, cu, cu, max_seqlen_q=a, max_seqlen_k=b, is_causal=True)
        for a, b in ((19, 19), (1, 10**9), (np.int64(3), jnp.int32(7)))
    )
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.usefixtures("on_device")
def test_a_pack_drops_what_one_long_sequence_drops(rng):
    q, k, v = _arrays(rng, 60, 90, 4, 2, 16)
    cu_q, cu_k = np.array([0, 13, 60]), np.array([0, 40, 90])
    mask = (np.searchsorted(cu_q, np.arange(60), "right")[:, None] == np.searchsorted(cu_k, np.arange(90), "right"))[
        None
    ]
    dropout = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(3)}
    packed = varlen_attention(q, k, v, cu_q, cu_k, **BOUNDS, **dropout)
    calls.assert_close(packed, attention(q, k, v, mask=mask, **dropout), jnp.bfloat16)


@pytest.mark.usefixtures("on_device")
def test_deterministic_runs_agree_bitwise(rng):
    q, k, v = _arrays(rng, 700, 700, 4, 2, 64)
    cu = jnp.asarray([0, 5, 300, 301, 640])

    @jax.jit
    def run(q, k, v):
        call = functools.partial(varlen_attention, **BOUNDS, is_causal=True, deterministic=True)
        out, pullback = jax.vjp(lambda q, k, v: call(q, k, v, cu, cu), q, k, v)
        return out, *pullback(out)

    first = run(q, k, v)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, first, run(q, k, v))
