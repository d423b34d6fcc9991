"""Faults that attention libraries have had, each as a small test, with values from our own oracle.

What the rows of cases.py, or the tests of transformations, errors, memory and export guard is not repeated here.
"""

import functools
import gc
import importlib
import os
import pathlib
import subprocess
import sys
import textwrap

import cases
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_flash2
from jax_flash2 import _native, attention
from jax_flash2.testing import assert_accurate

BR, TL = {"is_causal": True, **cases.BOTTOM_RIGHT}, {"is_causal": True, **cases.TOP_LEFT}


def random(rng, *shapes, dtype="bfloat16", device=None):
    return [jax.device_put(rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)), device) for shape in shapes]


def qkv(rng, batch, T, S, N, K, D, dtype="bfloat16", device=None):
    return random(rng, (*batch, T, N, D), (*batch, S, K, D), (*batch, S, K, D), dtype=dtype, device=device)


def ulps(a, b, of):
    """The largest difference in units of the last place of the largest |of|."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    eps = float(jnp.finfo(of.dtype).eps)
    return np.abs(a - b).max() / (eps * 2.0 ** np.floor(np.log2(np.abs(np.asarray(of, np.float64)).max())))


# Numbers.


def test_huge_equal_values_with_one_key_give_that_key(device):
    """Softmax over one key is 1, however large the score."""
    x = jax.device_put(jnp.full((1, 1, 1, 64), 133120, jnp.bfloat16), device)
    out, lse = jax.jit(lambda x: attention(x, x, x, return_residual=True))(x)
    np.testing.assert_array_equal(out, x)
    np.testing.assert_allclose(lse, 133120.0**2 * 8, rtol=1e-6)


def test_a_saturated_row_is_that_row_of_value(rng, device):
    """A maximum that was rounded before it is subtracted leaves the winner's weight beside 1."""
    q, k, v = qkv(rng, (2,), 60, 96, 2, 1, 64)
    q, k = q * 60, k * 60
    scores = np.einsum("btnd,bsd->btns", *(np.asarray(x, np.float64) for x in (q, k[:, :, 0]))) / 8
    first, second = np.sort(scores)[..., [-1, -2]].transpose(3, 0, 1, 2)
    clear = first - second > 60
    assert clear.mean() > 0.5
    out = jax.jit(attention)(*jax.device_put((q, k, v), device))
    b = np.arange(2)[:, None, None]
    winner = np.asarray(v, np.float64)[b, scores.argmax(-1), 0]
    error = np.abs(np.asarray(out, np.float64) - winner)[clear]
    assert (error <= 2.0**-7 * np.abs(winner)[clear]).all()


def test_a_row_without_keys_does_not_poison_weight_gradients(rng, device):
    """Its 0 must not meet a NaN, even when the loss leaves the row out."""
    x, w, u = random(rng, (2, 4, 1, 8), (8, 8), (8, 3), device=device)

    def loss(x, w):
        y = x @ w
        out = attention(
            y, y, y, is_causal=True, local_window_size=(1, 0), key_value_seq_lengths=np.array([4, 2]), **cases.TOP_LEFT
        )
        return jnp.sum((out[:, :2] @ u).astype(jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, w)
    np.testing.assert_array_equal(out[1, 3], 0)
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
        assert np.abs(np.asarray(gradient, np.float32)).max() > 0


def test_no_infinity_on_the_way_in_float64(device):
    """A large negative number in place of -inf overflows when it is cast."""
    case = next(case for case in cases.CASES if case.id == "causal-square")
    with jax.enable_x64(True), jax.default_device(device):
        arrays = {name: jnp.asarray(x, jnp.float64) for name, x in case.arrays().items()}
        with jax.debug_infs(True), jax.debug_nans(True):
            out = jax.jit(functools.partial(attention, is_causal=True))(*(arrays[n] for n in ("query", "key", "value")))
        assert_accurate(out, out, evaluate.exact(case, "float64")["out"], "float64")


# Masks.


@pytest.mark.parametrize("key", [6, 7, 10, 11])
def test_support_of_one_row(rng, device, key):
    """Query 10 of a causal window of 3 reads keys 7 to 10: another key changes no bit of it, one of them does."""
    q, k, v = qkv(rng, (1,), 64, 64, 1, 1, 32, device=device)
    call = jax.jit(functools.partial(attention, is_causal=True, local_window_size=(3, 0)))
    before = call(q, k, v)[0, 10]
    after = call(q, k.at[0, key].add(jnp.bfloat16(3)), v.at[0, key].add(jnp.bfloat16(3)))[0, 10]
    assert bool((before == after).all()) == (key in (6, 11))


@pytest.mark.parametrize("left", [69, 70, 75])
def test_a_window_as_long_as_the_sequence_is_no_window(rng, device, left):
    q, k, v = qkv(rng, (2,), 70, 70, 2, 1, 16, device=device)
    windowed, causal = (
        jax.jit(functools.partial(attention, is_causal=True, local_window_size=w))(q, k, v) for w in ((left, 0), None)
    )
    assert ulps(windowed, causal, causal) <= 1


def test_one_query_at_either_corner(rng, device):
    """The last query reads every key, the first reads the first."""
    q, k, v = qkv(rng, (2,), 1, 16, 4, 4, 64, device=device)
    everything = attention(q, k, v)
    np.testing.assert_array_equal(attention(q, k, v, **BR), everything)
    np.testing.assert_array_equal(attention(q, k, v, **TL)[:, 0], v[:, 0])


def test_a_key_gets_no_gradient_from_queries_whose_window_misses_it(rng, device):
    q, k, v = qkv(rng, (2,), 90, 90, 2, 1, 16, device=device)
    out, pullback = jax.vjp(functools.partial(attention, is_causal=True, local_window_size=(20, 0)), q, k, v)
    dout = jnp.ones_like(out).at[:, :61].set(0)  # queries from 61 on read keys from 41 on
    _, dk, dv = pullback(dout)
    for gradient in (dk, dv):
        np.testing.assert_array_equal(gradient[:, :41], 0)
        assert (np.abs(np.asarray(gradient[:, 41:], np.float32)).max((0, 2, 3)) > 0).all()


# Shapes.


def test_every_short_length(rng, device):
    """Queries and keys fewer than a tile has rows, in one program."""
    lengths = [(T, S) for T in (1, 2, 3, 7, 8, 9) for S in (1, 2, 4, 7, 8, 9)]
    inputs = [[*qkv(rng, (2,), T, S, 2, 1, 64), *random(rng, (2, T, 2, 64))] for T, S in lengths]

    @jax.jit
    def run(inputs):
        return [pullback(dout) for *xs, dout in inputs for _, pullback in [jax.vjp(attention, *xs)]]

    for arrays, got in zip(inputs, run(jax.device_put(inputs, device)), strict=True):
        want = oracle.attention(*arrays, np.zeros(arrays[3].shape[:-1]))
        for name, gradient in zip(("dquery", "dkey", "dvalue"), got, strict=True):
            # A gradient may be 0 all over (one key): then what is left of it is measured by what cancelled.
            bound = 8 * 2.0**-7 * max(np.abs(want[name]).max(), 1)
            assert np.abs(np.asarray(gradient, np.float64) - want[name]).max() <= bound


def test_every_cache_length(rng, device):
    """A decoding step at each length of the cache, as one batch."""
    S = 66
    q, k, v = qkv(rng, (S + 1,), 1, S, 4, 2, 16, device=device)
    lengths = np.arange(S + 1)
    out, lse = jax.jit(functools.partial(attention, **BR, key_value_seq_lengths=lengths, return_residual=True))(q, k, v)
    want = oracle.attention(q, k, v, np.zeros(q.shape), np.zeros(q.shape[:-1]), key_value_seq_lengths=lengths)
    assert_accurate(out, want["out"], want["out"], "bfloat16", "out")
    assert_accurate(lse, want["lse"], want["lse"], "float32", "lse")


def test_a_full_cache_with_a_length_is_the_cache_cut_there(rng, device):
    q, k, v = qkv(rng, (1,), 1, 2000, 4, 4, 64, device=device)
    whole = attention(q, k, v, **BR, key_value_seq_lengths=1300)
    cut = attention(q, k[:, :1300], v[:, :1300], **BR)
    assert ulps(whole, cut, cut) <= 2


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_more_batch_rows_than_a_grid_has(device, kind):
    """A batch above 65535, forward and backward; the answer is the row's own number."""
    B, T, S, N, D = 65_537, 1, 2, 2, 8
    rows = jnp.arange(B, dtype=jnp.int32) % 251
    v = jnp.broadcast_to(rows.astype(kind)[:, None, None, None], (B, S, N, D))
    q, k, v = jax.device_put((jnp.ones((B, T, N, D), kind), jnp.ones((B, S, N, D), kind), v), device)
    out, pullback = jax.vjp(jax.jit(attention), q, k, v)
    rtol, atol = (1e-5, 0.1) if kind == "float32" else (0, 0)

    def near(got, want, **bound):
        np.testing.assert_allclose(np.asarray(got, np.float32), want, **bound)

    v = np.asarray(v, np.float32)
    near(out, np.broadcast_to(v[:, :1], out.shape), rtol=rtol)
    dq, dk, dv = pullback(out)
    near(dv, v / 2, rtol=rtol)
    near(dq, 0, atol=atol)  # what is left where numbers up to 8 * 250**2 cancel
    near(dk, 0, atol=atol)


# Operands.


def test_parts_of_one_projection_are_like_copies(rng, device):
    """Slices of one array have strides that are not those of a dense one."""
    (x,) = random(rng, (2, 33, 18, 16), device=device)
    (dout,) = random(rng, (2, 33, 16, 16), device=device)

    def split(x):
        return x[:, :, :16], x[:, :, 16:17], x[:, :, 17:]

    @jax.jit
    def packed(x):
        out, pullback = jax.vjp(lambda x: attention(*split(x), **TL), x)
        return out, *pullback(dout)

    @jax.jit
    def apart(q, k, v):
        out, pullback = jax.vjp(functools.partial(attention, **TL), q, k, v)
        return out, jnp.concatenate(pullback(dout), axis=2)

    copies = jax.device_put([np.ascontiguousarray(part) for part in split(np.asarray(x))], device)
    jax.tree.map(np.testing.assert_array_equal, packed(x), apart(*copies))


def test_memory_order_of_inputs_does_not_matter(rng, device):
    q, k, v = qkv(rng, (2,), 24, 24, 2, 2, 16, device=device)
    want = attention(q, k, v)
    fortran = [np.asfortranarray(np.asarray(x)) for x in (q, k, v)]
    with jax.default_device(device):
        np.testing.assert_array_equal(attention(*fortran), want)
    transposed = [jnp.swapaxes(x, -1, -2) for x in (q, k, v)]
    call = jax.jit(lambda *xs: attention(*(jnp.swapaxes(x, -1, -2) for x in xs)))
    np.testing.assert_array_equal(call(*transposed), want)


def test_options_of_other_calls_in_the_process_do_not_leak(rng, device):
    """A cache of compiled kernels must be keyed by the value of an option."""
    q, k, v = (4 * x for x in qkv(rng, (2,), 48, 48, 2, 1, 64, device=device))
    outs = [
        np.asarray(attention(q, k, v, logits_soft_cap=cap, is_causal=True), np.float32) for cap in (None, 15, 50, 15)
    ]
    np.testing.assert_array_equal(outs[1], outs[3])
    assert all(np.abs(outs[i] - outs[j]).max() > 0.01 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_lengths_and_scale_in_the_carry_of_a_scan(rng, device):
    """Traced operands of a loop that is differentiated: nothing may be kept as if it were static."""
    q, k, v = qkv(rng, (3,), 16, 16, 2, 2, 8, device=device)
    lengths = jnp.asarray([16, 3, 9], jnp.int32)

    def step(carry, _):
        x, lengths, scale = carry
        x = attention(x, k, v, key_value_seq_lengths=lengths, scale=scale)
        return (x, jnp.maximum(lengths - 2, 0), scale * 2), None

    def scanned(x, scale):
        (x, _, _), _ = jax.lax.scan(step, (x, lengths, scale), length=3)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def unrolled(x, scale):
        carry = (x, lengths, scale)
        for _ in range(3):
            carry, _ = step(carry, None)
        return jnp.sum(carry[0].astype(jnp.float32) ** 2)

    with jax.default_device(device), jax.check_tracer_leaks(True):
        got, want = (jax.jit(jax.grad(f, (0, 1)))(q, jnp.float32(0.5)) for f in (scanned, unrolled))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-3)


# Runs.


def test_each_device_computes_where_its_data_are(rng, backend):
    devices = jax.devices(backend)
    arrays = qkv(rng, (2,), 33, 47, 4, 2, 16)
    first, last = (jax.jit(attention)(*jax.device_put(arrays, d)) for d in (devices[0], devices[-1]))
    assert last.devices() == {devices[-1]}
    np.testing.assert_array_equal(first, last)


def test_handlers_outlive_what_python_collects(rng, device):
    q, k, v = qkv(rng, (2,), 20, 20, 2, 2, 16, device=device)
    call = jax.jit(attention)
    first = np.asarray(call(q, k, v))
    for _ in range(20):
        jax.clear_caches()
        importlib.reload(_native)  # registers them anew, and lets go of what Python held of the old ones
        gc.collect()
        np.testing.assert_array_equal(call(q, k, v), first)


def test_what_is_stable_without_being_deterministic(rng, device):
    """out, and where heads are not shared dk and dv, are the same bits in every run; dq within two units."""
    q, k, v = qkv(rng, (2,), 200, 200, 4, 4, 64, device=device)
    (dout,) = random(rng, q.shape, device=device)

    @jax.jit
    def run(q, k, v):
        out, pullback = jax.vjp(functools.partial(attention, is_causal=True), q, k, v)
        return out, *pullback(dout)

    out, dq, dk, dv = run(q, k, v)
    for _ in range(20):
        again = run(q, k, v)
        for a, b in zip((out, dk, dv), (again[0], *again[2:]), strict=True):
            np.testing.assert_array_equal(a, b)
        assert ulps(dq, again[1], dq) <= 2


def test_the_program_says_which_path_runs(backend):
    """An explicit request, or none, is the kernel, visibly; the reference is not. Nothing falls back in silence."""
    with jax.default_device(jax.devices(backend)[0]):
        x = jnp.ones((2, 5, 2, 16), jnp.bfloat16)
        for implementation, count in ((None, 1), (backend, 1), ("reference", 0)):
            call = jax.jit(functools.partial(attention, implementation=implementation))
            text = call.lower(x, x, x).as_text()
            assert text.count("jax_flash2_forward_v1") == count


DIRTY = """
    import jax, jax.numpy as jnp, numpy as np
    from jax_flash2 import attention
    rng = np.random.default_rng(0)
    shapes = (2, 523, 4, 24), (2, 611, 2, 24), (2, 611, 2, 24), (2, 523, 4, 24)
    q, k, v, dout = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)

    @jax.jit
    def run(q, k, v):
        options = dict(is_causal=True, causal_alignment="bottom_right", implementation=IMPLEMENTATION)
        out, pullback = jax.vjp(lambda *xs: attention(*xs, **options), q, k, v)
        return out, *pullback(dout)

    runs = [jax.tree.map(np.asarray, run(q, k, v)) for _ in range(10)]
    for other in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, runs[0], other)
    IMPLEMENTATION = "reference"
    jax.clear_caches()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), runs[0], run(q, k, v))
"""


def test_the_first_call_of_a_process_reads_no_stale_memory():
    """Lengths that no tile divides, with every allocation filled with garbage (glibc), in all ten calls alike."""
    code = 'IMPLEMENTATION = "cpu"\n' + textwrap.dedent(DIRTY)
    environment = os.environ | {"MALLOC_PERTURB_": "85", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True, timeout=300)


def test_private_jax_is_used_in_one_file():
    """Private modules come and go; what differs between versions, or is not public, has one file."""
    for path in pathlib.Path(jax_flash2.__file__).parent.glob("*.py"):
        for private in ("jax._src", "xla_client", "jax.lib"):
            assert private not in path.read_text() or path.name == "_compat.py", path
