"""Memory grows with T, never with T * S: by what the compiler plans, and by what a process takes while it runs."""

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import attention

N, K, D = 4, 2, 64


@functools.cache
def _planned(gradient: bool, length: int) -> tuple[int, int]:
    """Bytes that XLA sets aside beside the arguments: for results, and for what lies between."""
    call = functools.partial(attention, is_causal=True)

    def pulled(query, key, value):
        return jax.grad(lambda *xs: jnp.sum(call(*xs) ** 2), (0, 1, 2))(query, key, value)

    shapes = [(1, length, heads, D) for heads in (N, K, K)]
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with jax.default_device(jax.devices("cpu")[0]):
        memory = jax.jit(pulled if gradient else call).lower(*avals).compile().memory_analysis()
    return memory.output_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_planned_memory_is_linear(gradient):
    (_, small), (output, large) = _planned(gradient, 2048), _planned(gradient, 8192)
    assert large <= 4 * small + 4096
    # What must live: out and lse, in the gradient also dout. Nothing near T * S, 1 GiB here.
    row = 4 * N * (D + 1)
    assert output + large <= 8192 * row * (4 if gradient else 1) * 1.1


def test_process_memory():
    """Beside what the planner knows: what the kernels take from the heap. A T x S matrix would be 512 MiB a head."""
    program = """
        import resource, sys
        import jax, jax.numpy as jnp
        from jax_flash2 import attention

        def loss(x):
            return jnp.sum(attention(x, x, x, local_window_size=128, causal_alignment="top_left"))

        gradient = jax.jit(jax.grad(loss))

        def peak(length):
            gradient(jnp.ones((1, length, 2, 16))).block_until_ready()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

        print(peak(256), peak(11585))
    """
    run = [sys.executable, "-P", "-c", textwrap.dedent(program)]
    done = subprocess.run(
        run, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after - before < 100, "MiB"
