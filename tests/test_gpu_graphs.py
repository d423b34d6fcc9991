"""CUDA graphs hold the kernels of a scan and of a while loop too, and change no bit. In processes of their own, because
XLA reads the flags that turn graphs on and off once."""

import os
import subprocess
import sys
import textwrap

import evaluate
import pytest

pytestmark = pytest.mark.skipif("cuda" not in evaluate.BACKENDS, reason="needs a GPU")

PROGRAM = """
    import collections, functools, hashlib, pathlib, sys, tempfile
    import jax, jax.numpy as jnp, numpy as np
    from jax_flash2 import attention, varlen_attention

    def arrays(*shape):
        return [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3)]

    def attend(k, v, x):
        return attention(x, k, v, is_causal=True, deterministic=True)

    def attend_packed(k, v, x):
        starts = jnp.asarray([0, 1000, 1024, 5000, 8192], jnp.int32)
        most = {"max_seqlen_q": 4000, "max_seqlen_k": 4000}
        return varlen_attention(x, k, v, starts, starts, **most, is_causal=True, deterministic=True)

    def scanned(layer, length, q):
        def loss(q):
            return jnp.sum(jax.lax.scan(lambda x, _: (layer(x), None), q, length=length)[0].astype(jnp.float32) ** 2)

        return jax.grad(loss)(q)

    def looped(layer, _, q):
        return jax.lax.while_loop(lambda state: state[0] < 32, lambda state: (state[0] + 1, layer(state[1])), (0, q))[1]

    # The second one's blocks draw their tiles from a queue, and the third one's, of which a kernel reads the starts.
    small, queued, packed = (2, 128, 4, 64), (8, 1024, 32, 64), (8192, 8, 64)
    for layer, shape, length in ((attend, small, 32), (attend, queued, 8), (attend_packed, packed, 8)):
        q, k, v = arrays(*shape)
        for repeated in (scanned, looped):
            function = jax.jit(functools.partial(repeated, functools.partial(layer, k, v), length))
            for _ in range(4):
                result = jax.block_until_ready(function(q))
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _ in range(5):
                        jax.block_until_ready(function(q))
                (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
                events = collections.Counter()
                for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                    for line in plane.lines:
                        events.update(event.name for event in line.events)
            graphs = sum(count for name, count in events.items() if "GraphLaunch" in name)
            print("graphs", hashlib.sha256(np.asarray(result, np.float32).tobytes()).hexdigest(), graphs)
"""


def _run(flags):
    environment = os.environ | {"XLA_FLAGS": flags}
    command = [sys.executable, "-P", "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("graphs ")]
    return [digest for digest, _ in told], [int(graphs) for _, graphs in told]


def test_scan_and_while_are_held_by_graphs_and_change_no_bit():
    """A body with one call is below XLA's default least size of a graph."""
    digests, graphs = _run("--xla_gpu_graph_min_graph_size=1")
    assert len(graphs) == 6
    assert min(graphs) > 0, graphs
    plain_digests, plain_graphs = _run("--xla_gpu_enable_command_buffer=")
    assert plain_graphs == [0] * 6
    assert digests == plain_digests
