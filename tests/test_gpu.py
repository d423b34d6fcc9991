"""What only a GPU shows: what the compiler sets aside, that CUDA graphs hold the kernels, and that repeats agree."""

import collections

import cases
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import packs
import pytest

from jax_flash2 import _spans, attention, capabilities, varlen_attention
from jax_flash2._spec import AttentionSpec

pytestmark = pytest.mark.skipif("cuda" not in evaluate.BACKENDS, reason="needs a GPU")

B, T, S, N, D = 2, 384, 640, 4, 64


def operands(key_heads: int):
    shapes = [(B, T, N, D), (B, S, key_heads, D), (B, S, key_heads, D), (B, T, N, D)]
    return [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)]


def gradients(deterministic: bool = False):
    def pulled(q, k, v, dout):
        call = lambda *xs: attention(*xs, is_causal=True, causal_alignment="top_left", deterministic=deterministic)  # noqa: E731
        return jax.vjp(call, q, k, v)[1](dout)

    return jax.jit(pulled)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("key_heads", [N, 2])
def test_planned_memory_is_the_documented_workspaces(key_heads, deterministic):
    memory = gradients(deterministic).lower(*operands(key_heads)).compile().memory_analysis()
    out, row = 2 * B * T * N * D, 4 * B * N * T
    documented = {
        "out": out,
        "lse": row,
        "delta": row,
        "dq_acc": row * D,
        "dk_acc, dv_acc": 2 * 4 * B * key_heads * S * D if key_heads != N else 0,
        "order": 4 * B * N * (-(-T // 32) + 1),
    }
    planned = memory.temp_size_in_bytes
    assert planned <= sum(documented.values()) + 4096, documented  # buffers are rounded up


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float64", 8)])
def test_planned_memory_in_more_bits(dtype, size):
    """Sums are made in registers: nothing but the residuals and delta, with a group or without."""
    for key_heads in (N, 2):
        with jax.enable_x64(dtype == "float64"):
            args = [x.astype(dtype) for x in operands(key_heads)]
            memory = gradients().lower(*args).compile().memory_analysis()
        assert memory.temp_size_in_bytes <= size * (B * T * N * D + 2 * B * N * T) + 4096


def test_planned_memory_with_a_shared_bias():
    """Beside the residuals, copies of query, key and value at most: one bias for each row and head would be 512 MiB."""
    B, T, N, D = 8, 2048, 8, 64
    x = jax.ShapeDtypeStruct((B, T, N, D), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 1, T, T), jnp.bfloat16)
    memory = jax.jit(attention).lower(x, x, x, bias).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64e6


def test_planned_memory_with_segment_ids():
    """A T x T mask would be 4 GiB."""
    T, N, D = 65_536, 2, 64
    x, ids = jax.ShapeDtypeStruct((1, T, N, D), jnp.bfloat16), jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(q, k, v, ids):
        out = attention(q, k, v, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids)
        return jnp.sum(out.astype(jnp.float32))

    for function in (loss, jax.grad(loss, (0, 1, 2))):
        memory = jax.jit(function).lower(x, x, x, ids).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 300e6


def test_capabilities_say_which_kernels_run():
    """Of this device, whose compute capability has kernels of its own or runs those of all."""
    row, device = capabilities()["cuda"]["devices"][0], jax.devices("cuda")[0]
    assert row["name"] == device.device_kind
    assert ".".join(map(str, row["compute_capability"])) == device.compute_capability
    assert row["arch"] == ("sm90" if device.compute_capability == "9.0" else "sm80")


# batch, heads, T, S: what is left of a tile of the kernel's, rows that are not aligned, one query, one key.
@pytest.mark.parametrize("shape", [(2, 1, 130, 1027), (1, 3, 129, 512), (3, 2, 7, 1030), (2, 2, 1, 33), (1, 2, 300, 1)])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_what_a_kernel_reads_of_a_mask_is_what_xla_reads(rng, shape, density):
    batch, heads, length, keys = shape
    mask = jnp.asarray(rng.random(shape) < density)
    q, k = (jnp.zeros((batch, n, heads, 8), jnp.bfloat16) for n in (length, keys))

    def spans(mask, native):
        return _spans.of(("q", "k", "v", "mask"), (q, k, k, mask), AttentionSpec(), native=native)

    got, want = (jax.jit(spans, static_argnums=1)(mask, native) for native in (True, False))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_calls_are_held_by_a_cuda_graph(tmp_path):
    """Handlers that a command buffer may record run once; after that the graph is launched, and no kernel by itself."""
    q, k, v, dout = operands(N)
    runs, calls = 20, 8

    @jax.jit
    def chain(q, k, v, dout):
        for _ in range(calls):
            q, k, v = gradients()(q, k, v, dout)
        return q, k, v

    for _ in range(3):
        jax.block_until_ready(chain(q, k, v, dout))
    with jax.profiler.trace(tmp_path):
        for _ in range(runs):
            jax.block_until_ready(chain(q, k, v, dout))
    (path,) = tmp_path.rglob("*.xplane.pb")
    events: collections.Counter[str] = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            events.update(event.name for event in line.events)
    graphs = sum(count for name, count in events.items() if "GraphLaunch" in name)
    alone = sum(count for name, count in events.items() if "LaunchKernel" in name)
    launches = {name: count for name, count in events.items() if "aunch" in name}
    assert graphs >= runs, launches
    assert alone < runs * calls, launches  # each call launches four kernels


def differences(call, sets, times: int) -> int:
    """In how many elements `times` calls, in one program, differ from the first on the same inputs.

    `sets` is a list of inputs that take turns, so that no call can be moved out of the loop and every call finds the
    results of another one in memory.
    """
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *sets)
    first = jax.tree.map(lambda *xs: jnp.stack(xs), *[call(*xs) for xs in sets])

    def bits(x):
        return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)

    @jax.jit
    def loop(stacked, first):
        def step(i, count):
            xs, want = jax.tree.map(lambda x: x[i % len(sets)], (stacked, first))
            apart = jax.tree.map(lambda a, b: jnp.sum(bits(a) != bits(b), dtype=jnp.int32), call(*xs), want)
            return count + sum(jax.tree.leaves(apart))

        return jax.lax.fori_loop(0, times, step, jnp.int32(0))

    return int(loop(stacked, first))


def input_sets(B: int, T: int, S: int, N: int, K: int, D: int, dtype, growth: float = 1.0):
    """Three sets of query, key, value and dout; the last one's keys are `growth` times as large at first as at last."""
    sets = []
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = [(B, T, N, D), (B, S, K, D), (B, S, K, D), (B, T, N, D)]
        q, k, v, dout = (jax.random.normal(key, x, jnp.float32) for key, x in zip(keys, shapes, strict=True))
        k = k * jnp.linspace(growth if seed == 2 else 1.0, 1.0, S, dtype=jnp.float32)[:, None, None]
        sets.append([x.astype(dtype) for x in (q, k, v, dout)])
    return sets


REPEATED = [
    ("float32", (2, 500, 700, 6, 2, 128), {"is_causal": True, "causal_alignment": "bottom_right"}),
    ("float64", (2, 500, 700, 6, 2, 128), {"is_causal": True, "causal_alignment": "bottom_right"}),
    # More tiles than multiprocessors, so that blocks walk lists; masks that cut tiles; rows that are done again.
    ("bfloat16", (4, 1024, 1024, 8, 8, 64), {}),
    ("float16", (4, 1000, 1000, 8, 2, 128), {"is_causal": True}),
    ("bfloat16", (2, 1024, 1500, 8, 4, 128), {"local_window_size": (300, 100), "causal_alignment": "top_left"}),
    ("bfloat16", (2, 1024, 1024, 8, 8, 256), {"is_causal": True}),
    ("float16", (1, 520, 777, 6, 3, 192), {"logits_soft_cap": 20.0}),
]


@pytest.mark.parametrize(("dtype", "sizes", "keywords"), REPEATED)
def test_a_thousand_forwards_agree_bit_for_bit(dtype, sizes, keywords):
    def call(q, k, v, _):
        return attention(q, k, v, return_residual=True, **keywords)

    with jax.enable_x64(dtype == "float64"):
        assert differences(jax.jit(call), input_sets(*sizes, dtype, growth=64.0), 1000) == 0


@pytest.mark.parametrize(("dtype", "sizes", "keywords"), REPEATED[:6])
def test_deterministic_gradients_agree_bit_for_bit(dtype, sizes, keywords):
    def call(q, k, v, dout):
        return jax.vjp(lambda *xs: attention(*xs, deterministic=True, **keywords), q, k, v)[1](dout)

    with jax.enable_x64(dtype == "float64"):
        assert differences(jax.jit(call), input_sets(*sizes, dtype), 200) == 0


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"local_window_size": (150, 40)}], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((40, 40), 64), ((40, 8), 96), ((24, 24), 128), ((24, 6), 256)], ids=str)
def test_more_tiles_than_multiprocessors(heads, dim, keywords):
    """Blocks then take several tiles each, from a queue where tiles differ."""
    shapes = [(4, 700, heads[0], dim), (4, 700, heads[1], dim), (4, 700, heads[1], dim)]
    q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    if keywords:
        keywords = {"causal_alignment": "top_left", **keywords}
    lengths = {"query_seq_lengths": jnp.array([700, 0, 333, 690]), "key_value_seq_lengths": jnp.array([650, 700, 1, 0])}

    @jax.jit
    def both(q, k, v):
        results, wide = [], [x.astype(jnp.float32) for x in (q, k, v)]
        for extra in ({}, lengths):
            results += attention(q, k, v, return_residual=True, **keywords, **extra)
            with jax.default_matmul_precision("highest"):
                results += attention(*wide, return_residual=True, implementation="reference", **keywords, **extra)
        return results

    out, lse, out_true, lse_true, cut, cut_lse, cut_true, cut_lse_true = both(q, k, v)
    for got, want in ((out, out_true), (cut, cut_true)):
        assert jnp.linalg.norm(got.astype(jnp.float32) - want) <= 4e-3 * jnp.linalg.norm(want)
    for got, want in ((lse, lse_true), (cut_lse, cut_lse_true)):
        assert bool(jnp.all((got == want) | (jnp.abs(got - want) < 1e-3)))  # == : -inf where nothing is seen


def _documents(*lengths):
    """Ids of both sides, every third of which is padding: [1, the sum of all]."""
    ids = np.repeat([-1 if i % 3 == 2 else i for i in range(len(lengths))], lengths)[None]
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def _nan_in_padding(arrays):
    for x in arrays.values():
        x[:, 1800:1870] = np.nan


_CAUSAL, _RIGHT = cases.CAUSAL, cases.BOTTOM_RIGHT
# Hopper's blocks prepare and convert dQ's accumulators themselves where a tile of keys meets a thousand queries or so,
# and where there are tiles enough for all multiprocessors: else they split the query heads of a key head among them.
LONG = [
    cases.Case("full", "ends within tiles", 1100, 1290, 4, 4, 64),
    cases.Case("groups", "a group's heads share counters; the last rows are no block of 16", 1030, 1030, 6, 3, 128,
               batch=(5,), keywords=_CAUSAL),
    cases.Case("width", "between instances", 1027, 1500, 3, 3, 72, keywords=_CAUSAL | _RIGHT),
    cases.Case("scale", "its gradient reads the accumulators too", 1200, 1200, 4, 4, 96,
               operands={"scale": cases._floats(0.1, -0.2)}),
    cases.Case("lengths", "rows of tiles that nobody meets", 1090, 1090, 4, 4, 128, batch=(4,),
               keywords=_CAUSAL | _RIGHT,
               operands={"query_seq_lengths": cases._ints(1090, 0, 700, 3),
                         "key_value_seq_lengths": cases._ints(1090, 1000, 900, 0)}),
    cases.Case("window", "tiles that end on both sides", 2500, 2500, 2, 2, 64, batch=(1,),
               keywords={"local_window_size": (700, 100)}),
    cases.Case("drawn", "more keys than lists take", 1060, 8300, 2, 2, 128, batch=(1,), keywords=_CAUSAL | _RIGHT),
    cases.Case("soft-cap", "the general body", 1100, 1100, 4, 4, 128, keywords=_CAUSAL | {"logits_soft_cap": 20.0}),
    cases.Case("documents", "drawn, with padding that holds NaN", 3000, 3000, 4, 4, 64, batch=(1,), keywords=_CAUSAL,
               operands=_documents(1100, 700, 70, 1000, 130), spoil=_nan_in_padding),
    cases.Case("wide-documents", "the same, full, in wide heads", 3000, 3000, 2, 2, 128, batch=(1,),
               operands=_documents(1100, 700, 70, 1000, 130), spoil=_nan_in_padding),
]  # fmt: skip
LONG_PACK = packs.Pack("long", "a long sequence, short ones, and rows of none", (1500, 7, 0, 1200, 90), N=4, K=4, D=128,
                       before=(5, 5), behind=(60, 60), used_q=(1500, 5, 0, 1170, 90), used_k=(1400, 7, 0, 1200, 80),
                       keywords=_CAUSAL | _RIGHT)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.id)
def test_long_gradients(case, dtype):
    assert case.N == case.K or case.batch[0] * case.K * -(-case.S // 128) >= 132, "another schedule than is meant"
    got = evaluate.kernel(case, dtype, "cuda")
    evaluate.check(got, case, dtype, "out", *evaluate.names(case))
    evaluate.check_zeros(got, case, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_long_packs(dtype):
    packs.check(packs.run(varlen_attention, LONG_PACK, dtype, "cuda", max_seqlen_k=1500), LONG_PACK, dtype)
