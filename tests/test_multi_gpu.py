"""On two GPUs: a split call moves nothing between them, and each computes what it would alone.

What XLA makes of other splits is shown on eight CPU devices in test_partitioning.py, whose reading of HLO this uses.
"""

import threading

import calls
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_partitioning as partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import attention

GPUS = jax.devices("cuda")[:2] if "cuda" in evaluate.BACKENDS else []
pytestmark = pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")

B, T, S, N, D = 4, 256, 320, 8, 64
BATCH, HEADS = P("x"), P(None, None, "x")


def _arguments(heads=N, dtype="bfloat16"):
    """query, key, value, dout, dlse on the first GPU."""
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, D), (B, S, heads, D), (B, S, heads, D), (B, T, N, D)]
    xs = [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]
    return [*xs, jnp.asarray(rng.standard_normal((B, T, N), np.float32))]


def _gradients(query, key, value, dout, dlse):
    def call(*xs):
        return attention(*xs, is_causal=True, causal_alignment="bottom_right", return_residual=True, deterministic=True)

    (out, lse), pullback = jax.vjp(call, query, key, value)
    return out, lse, *pullback((dout, dlse))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("heads", [N, 2])
@pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
def test_no_collective_and_no_copy(spec, heads, kind):
    """The forward does with each row and head the same whatever else it is called with: it is compared bit for bit."""
    mesh = jax.sharding.Mesh(np.asarray(GPUS), ("x",), axis_types=(kind,))
    args = _arguments(heads)
    want = [np.asarray(x, np.float32) for x in jax.jit(_gradients)(*args)]
    text, got = partitioning._compile(_gradients, args, [spec] * 5, mesh)
    assert partitioning._count(text, *calls.COLLECTIVES) == {}
    moved = [x for x in text.splitlines() if " copy(" in x or " transpose(" in x]
    assert not [x for x in moved if "bf16[" in x], moved
    cut = 0 if spec is BATCH else 2
    local = [tuple(n // 2 if i == cut else n for i, n in enumerate(x.shape)) for x in args[:3]]
    forward, backward = partitioning._kernels(text)
    shapes = [f"bf16[{','.join(map(str, shape))}]" for shape in local]
    assert forward[:3] == backward[:3] == shapes
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
        tolerance = 0 if i < 2 else 2e-2 * np.abs(y).max()
        np.testing.assert_allclose(np.asarray(x, np.float32), y, rtol=0, atol=tolerance)


def test_key_heads_shared_by_both():
    """One key head, query heads on both: its gradient is summed over them, and no query moves."""
    mesh = jax.sharding.Mesh(np.asarray(GPUS), ("x",))
    args = _arguments(1)
    want = jax.jit(_gradients)(*args)
    text, got = partitioning._compile(_gradients, args, [HEADS, P(), P(), HEADS, HEADS], mesh)
    assert set(partitioning._count(text, *calls.COLLECTIVES)) <= {"all-reduce"}
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-2 * np.abs(y[np.isfinite(y)]).max())


def test_pmap_and_threads_compute_on_each():
    """By placement, by pmap, and from two threads at once: the same bits on both."""
    args = _arguments(2, "float16")
    want = [np.asarray(x) for x in jax.jit(_gradients)(*args)]
    mapped = jax.pmap(_gradients, devices=GPUS)(*(jnp.stack([x, x]) for x in args))
    results = {}

    def work(index):
        placed = jax.device_put(args, GPUS[index])
        for _ in range(20):
            results[index] = jax.jit(_gradients)(*placed)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert results[index][0].devices() == {GPUS[index]}
        for x, y, z in zip(results[index], mapped, want, strict=True):
            np.testing.assert_array_equal(x, z)
            np.testing.assert_array_equal(y[index], z)
