"""attention under jit, grad, checkpoint, scan and the rest: each transformation has its own small test."""

import functools
import os
import subprocess
import sys
import textwrap

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_flash2
from jax_flash2._spec import AttentionSpec, Extras
from jax_flash2._vjp import flash_attention

_plain = jax.jit(calls.gradients)


def _operands(seed, dtype=calls.DTYPE):
    return calls.arguments(seed, "query", "key", "value", dtype=dtype)


def _out(*xs, **keywords):
    return calls.output(*xs, return_residual=False, **keywords)


def _loss(*xs, **keywords):
    return jnp.sum(jnp.sin(_out(*xs, **keywords).astype(jnp.float32)))


def _softmax_attention(query, key, value, scale):
    """Bottom-right causal attention and its lse in float64 numpy."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    groups = query.shape[2] // key.shape[2]
    scores = scale * np.einsum("btnd,bsnd->bnts", query, key.repeat(groups, 2))
    scores[..., ~np.tri(query.shape[1], key.shape[1], key.shape[1] - query.shape[1], dtype=bool)] = -np.inf
    top = scores.max(-1, keepdims=True)
    total = np.exp(scores - top).sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnd->btnd", np.exp(scores - top) / total, value.repeat(groups, 2))
    return out, (top + np.log(total))[..., 0].swapaxes(1, 2)


def test_jit_and_eager_equal_a_softmax():
    xs = _operands(0)
    for call in (calls.output, jax.jit(calls.output)):
        out, lse = call(*xs, 0.4)
        want_out, want_lse = _softmax_attention(*xs, 0.4)
        assert out.dtype == calls.DTYPE
        assert lse.dtype == jnp.float32
        calls.assert_close(
            [out.astype(jnp.float32), lse], [x.astype(np.float32) for x in (want_out, want_lse)], out.dtype
        )


def test_numpy_arrays():
    xs = _operands(1)
    calls.assert_close(_out(*map(np.asarray, xs)), _out(*xs))


@pytest.mark.parametrize("keywords", [{}, {"is_causal": False, "logits_soft_cap": 0.7}, {"local_window_size": (3, 1)}])
@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_gradients_equal_finite_differences(backend, kind, keywords):
    with jax.enable_x64(kind == "float64"), jax.default_device(jax.devices(backend)[0]):
        *xs, scale, query_lens, key_lens = calls.arguments(2, *calls.NAMES[:6], dtype=jnp.dtype(kind))

        def call(*xs):
            out, lse = calls.output(*xs, query_seq_lengths=query_lens, key_value_seq_lengths=key_lens, **keywords)
            return out, jnp.where(jnp.isneginf(lse), 0, lse)

        exact = {"atol": 1e-6, "rtol": 1e-6, "eps": 1e-5} if kind == "float64" else {"atol": 2e-2, "rtol": 2e-2}
        check_grads(lambda *xs: call(*xs, 0.4), xs, order=1, modes=["rev"], **exact)
        # The scale is used in float32.
        check_grads(lambda scale: call(*xs, scale), [scale], order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


def test_value_and_grad():
    xs = _operands(3)
    value, gradient = jax.jit(jax.value_and_grad(_loss, argnums=1))(*xs)
    calls.assert_close(value, _loss(*xs), jnp.float32)
    calls.assert_close(gradient, jax.grad(_loss, argnums=1)(*xs))


def test_lse_is_used_by_the_backward_only_where_it_is_returned():
    xs = _operands(4)

    def backward(function):
        equations = calls.equations(jax.make_jaxpr(jax.grad(function))(*xs))
        return next(x.params["operands"] for x in equations if str(x.primitive) == "flash_backward")

    assert "dlse" not in backward(_loss)
    assert "dlse" in backward(lambda *xs: calls.output(*xs)[1].sum())


@pytest.mark.parametrize("shape", [(), (1,), (calls.B,)])
def test_gradient_of_a_traced_scale_has_its_shape(shape):
    query, key, value = _operands(5)
    scale = calls.random(5, "scale", shape)
    rows = [(jnp.broadcast_to(scale, (calls.B,))[b], query[b], key[b], value[b]) for b in range(calls.B)]
    per_row = jnp.stack([jax.grad(lambda s, *xs: _loss(*xs, s))(*row) for row in rows])
    want = per_row if shape == (calls.B,) else per_row.sum().reshape(shape)
    calls.assert_close(jax.jit(jax.grad(lambda s: _loss(query, key, value, s)))(scale), want)


def test_shared_batch_axes_get_the_sum_of_their_rows_gradients():
    """Below the public call a key, value or scale may have size 1 where the query has a batch."""
    query, key, value = _operands(19)
    args = (query, key[:1], value[:1], jnp.full((1,), 0.4, jnp.float32))

    def loss(query, key, value, scale):
        call = functools.partial(flash_attention, return_residual=False, implementation=None)
        return jnp.sum(jnp.sin(call(query, key, value, Extras(scale=scale), AttentionSpec()).astype(jnp.float32)))

    def repeated(query, *shared):
        return loss(query, *(jnp.concatenate([x, x]) for x in shared))

    argnums = (0, 1, 2, 3)
    calls.assert_close(jax.jit(jax.grad(loss, argnums))(*args), jax.jit(jax.grad(repeated, argnums))(*args))


def test_lengths_are_integers_to_a_gradient():
    """They have the cotangent that JAX gives integers: none, of type float0."""
    args = calls.arguments(6)[:6]

    def loss(*xs):
        return _loss(*xs[:4], query_seq_lengths=xs[4], key_value_seq_lengths=xs[5])

    gradients = jax.grad(loss, argnums=(0, 4, 5), allow_int=True)(*args)
    assert [x.dtype for x in gradients[1:]] == [jax.dtypes.float0] * 2
    calls.assert_close(gradients[0], jax.grad(loss)(*args))


# The kernels that a training step runs, by counting primitives.


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [(None, 2), (jax_flash2.checkpoint_policy(), 1), (jax.checkpoint_policies.save_only_these_names("context"), 1)],
    ids=["recomputes everything", "our policy", "the name that others use"],
)
def test_checkpoint(policy, forwards):
    xs = _operands(7)

    def layer(*xs):
        return jnp.sum(jnp.sin(_out(*(jnp.cos(x) for x in xs)).astype(jnp.float32)))

    saved = jax.checkpoint(layer, policy=policy)
    counts = calls.count(jax.grad(saved), *xs)
    assert (counts["flash_forward"], counts["flash_backward"]) == (forwards, 1)
    calls.assert_close(jax.jit(jax.grad(saved, (0, 1, 2)))(*xs), jax.jit(jax.grad(layer, (0, 1, 2)))(*xs))


def test_kernels_of_a_compiled_training_step():
    """What is counted above holds in the program that XLA compiles, and costs no bit of the gradient."""
    xs = _operands(20)

    def step(policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, _):
            return (x + _out(jnp.cos(x), xs[1], xs[1], deterministic=True)).astype(x.dtype), None

        def loss(x):
            return jnp.sum(jnp.sin(jax.lax.scan(layer, x, length=2)[0]).astype(jnp.float32))

        compiled = jax.jit(jax.grad(loss)).lower(xs[0]).compile()
        text = compiled.as_text()
        targets = [f'custom_call_target="jax_flash2_{name}_v1"' for name in ("forward", "backward")]
        return [text.count(target) for target in targets], compiled(xs[0])

    for policy, forwards in ((None, 2), (jax_flash2.checkpoint_policy(), 1)):
        counts, gradient = step(policy)
        assert counts == [forwards, 1]
        np.testing.assert_array_equal(gradient, step(jax.checkpoint_policies.everything_saveable)[1])


def test_policies_combine():
    """Ours beside another: matrix products and attention are kept, the rest is done again."""
    xs = _operands(21)
    both = jax.checkpoint_policies.save_from_both_policies(
        jax_flash2.checkpoint_policy(), jax.checkpoint_policies.dots_saveable
    )

    def layer(query, *rest):
        weights = jnp.eye(calls.D, dtype=query.dtype)
        return jnp.sum(jnp.sin(_out(query @ weights, *rest).astype(jnp.float32)))

    counts = calls.count(jax.grad(jax.checkpoint(layer, policy=both)), *xs)
    assert counts["flash_forward"] == 1
    counts = calls.count(jax.grad(jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)), *xs)
    assert counts["flash_forward"] == 2


def test_structure_is_the_same_with_and_without_a_gradient():
    """Tuples, dicts and lists around the call come back as they were, lse or not."""
    xs = _operands(22)

    def loss(tree, residual):
        result = calls.output(*tree["qkv"], return_residual=residual)
        wrapped = {"result": [result], "rest": (tree["qkv"][0],)}
        return jnp.sum(jax.tree.leaves(result)[0].astype(jnp.float32)), wrapped

    for residual in (True, False):
        tree = {"qkv": list(xs)}
        plain = loss(tree, residual)
        (value, aux), gradient = jax.jit(jax.value_and_grad(functools.partial(loss, residual=residual), has_aux=True))(
            tree
        )
        assert jax.tree.structure((value, aux)) == jax.tree.structure(plain)
        assert jax.tree.structure(gradient) == jax.tree.structure(tree)
        assert isinstance(aux["result"][0], tuple) == residual


def test_merging_partial_results_by_lse():
    """As MaxText calls attention: unscaled, its output under the checkpoint name "context", parts of the keys merged by
    float32 lse [B, N, T]; the whole equals one call, gradients through lse included."""
    query, key, value = _operands(23)

    def merged(query, key, value):
        parts = [
            calls.output(query, key[:, s], value[:, s], 1.0, is_causal=False) for s in (slice(0, 4), slice(4, None))
        ]
        lse = [jnp.swapaxes(lse, 1, 2) for _, lse in parts]
        total = jnp.logaddexp(*lse)
        weights = (jnp.swapaxes(jnp.exp(x - total), 1, 2)[..., None] for x in lse)
        return sum(w * out.astype(jnp.float32) for w, (out, _) in zip(weights, parts, strict=True))

    def whole(query, key, value):
        return _out(query, key, value, 1.0, is_causal=False).astype(jnp.float32)

    policy = jax.checkpoint_policies.save_only_these_names("context")
    for function in (merged, whole):
        saved = jax.checkpoint(lambda *xs, f=function: jnp.sum(jnp.sin(f(*xs))), policy=policy)
        assert calls.count(jax.grad(saved), query, key, value)["flash_forward"] == (2 if function is merged else 1)
    got, want = (
        jax.jit(jax.value_and_grad(lambda *xs, f=f: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2)))(query, key, value)
        for f in (merged, whole)
    )
    calls.assert_close(got[1], want[1])


@pytest.mark.parametrize(("policy", "forwards"), [(None, 2), (jax_flash2.checkpoint_policy(), 1)], ids=["all", "ours"])
def test_checkpoint_of_lse(policy, forwards):
    """Computed again or kept, with lengths: bit by bit the gradients of the plain call."""
    *xs, _, lens = calls.arguments(8, "query", "key", "value", "query_lens", "key_lens")

    def loss(*xs):
        out, lse = calls.output(*xs, key_value_seq_lengths=lens, deterministic=True)
        return jnp.sum(out.astype(jnp.float32) ** 3) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) ** 2)

    saved = jax.checkpoint(loss, policy=policy)
    assert calls.count(jax.grad(saved), *xs)["flash_forward"] == forwards
    got, want = (jax.jit(jax.grad(f, (0, 1, 2)))(*xs) for f in (saved, loss))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_scan_and_checkpoint():
    """Layers as a scan over stacked weights, the carry being attended to, recomputed in the backward."""
    query, key, value = _operands(9)
    weights = calls.random(9, "query", (3, calls.D, calls.DV)) / 3
    carry = jnp.zeros(query.shape, query.dtype)

    def layer(x, w):
        return (x + _out(query + x, key, value) @ w.T).astype(x.dtype), None

    def scanned(query, weights):
        body = jax.checkpoint(layer, policy=jax_flash2.checkpoint_policy())
        return jnp.sum(jax.lax.scan(body, query, weights)[0].astype(jnp.float32) ** 2)

    def unrolled(query, weights):
        for w in weights:
            query = layer(query, w)[0]
        return jnp.sum(query.astype(jnp.float32) ** 2)

    got, want = (jax.jit(jax.grad(function, (0, 1)))(carry, weights) for function in (scanned, unrolled))
    calls.assert_close(got, want)


def test_scan_over_keys_in_chunks():
    """lse inside a loop carry: chunks of keys merged by it equal the whole call."""
    query, key, value = (x[:, : calls.T] for x in _operands(10))
    chunks = [jnp.stack(jnp.split(jnp.concatenate([x, x[:, ::-1]], 1), 2, 1)) for x in (key, value)]

    def merge(carry, chunk):
        out, lse = carry
        new_out, new_lse = calls.output(query, *chunk, is_causal=False)
        total = jnp.logaddexp(lse, new_lse)
        parts = (x.astype(jnp.float32) * jnp.exp(y - total)[..., None] for x, y in ((out, lse), (new_out, new_lse)))
        return (sum(parts), total), None

    empty = jnp.zeros((*query.shape[:-1], calls.DV)), jnp.full(query.shape[:-1], -jnp.inf)
    (out, lse), _ = jax.jit(lambda: jax.lax.scan(merge, empty, chunks))()
    whole = calls.output(query, *(x.swapaxes(0, 1).reshape(calls.B, -1, *x.shape[3:]) for x in chunks), is_causal=False)
    calls.assert_close((out.astype(calls.DTYPE), lse), whole)


def test_eval_shape():
    xs = _operands(11)
    out, lse = jax.eval_shape(calls.output, *xs)
    assert (out.shape, out.dtype) == ((calls.B, calls.T, calls.N, calls.DV), calls.DTYPE)
    assert (lse.shape, lse.dtype) == ((calls.B, calls.T, calls.N), jnp.float32)
    gradients = jax.eval_shape(jax.grad(_loss, (0, 1, 2)), *xs)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in xs]


def test_donated_buffers():
    xs = _operands(12)
    want = _plain(*calls.arguments(12))[2]
    step = jax.jit(lambda query, *rest: query - calls.gradients(query, *rest)[2], donate_argnums=0)
    donated, *rest = calls.arguments(12)
    calls.assert_close(step(donated, *rest), xs[0] - want)
    assert donated.is_deleted()


def test_x64_mode_changes_nothing_for_narrow_arrays():
    """Constants and lengths default to 64 bits there; none may reach a kernel."""
    want = [np.asarray(x) for x in _plain(*calls.arguments(13))]
    with jax.enable_x64(True):
        args = [x.astype(jnp.int64) if x.dtype == jnp.int32 else x for x in calls.arguments(13)]
        calls.assert_close([np.asarray(x) for x in jax.jit(calls.gradients)(*args)], want)


def test_strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        calls.assert_close(jax.jit(calls.gradients)(*calls.arguments(14)), _plain(*calls.arguments(14)))


def test_without_jit():
    with jax.disable_jit():
        got = calls.gradients(*calls.arguments(15))
    calls.assert_close(got, _plain(*calls.arguments(15)))


def test_debug_nans_sees_none_in_empty_rows():
    args = calls.arguments(16)
    with jax.debug_nans(True):
        jax.block_until_ready(jax.jit(calls.gradients)(*args))


def test_implementation_insists_on_a_platform():
    xs = jax.device_put(_operands(18, jnp.bfloat16), jax.devices("cpu")[0])
    calls.assert_close(_out(*xs, implementation="cpu"), _out(*xs))
    with pytest.raises(NotImplementedError, match=r"compiled for 'cpu'.*cuda device"):
        _out(*xs, implementation="cuda")


def test_no_deadlock():
    """Many calls at once on two cores, on eight devices: no call may wait for a task that has not started."""
    program = """
        import os
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        import jax, jax.numpy as jnp, numpy as np
        from jax_flash2 import attention

        def gradient(x):
            call = jax.vmap(lambda y: attention(y, y, y, is_causal=True))
            return jax.grad(lambda x: sum(jnp.sum(call(y) ** 2) for y in x))(x)

        x = np.random.default_rng(0).standard_normal((16, 8, 70, 2, 16), np.float32)
        print(len(jax.devices()))
        for _ in range(3):
            print(jnp.sum(jax.jit(gradient)(x) ** 2))
            print(jnp.sum(jax.pmap(gradient, in_axes=1, out_axes=1)(x[:, :, None]) ** 2))
    """
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-P", "-c", textwrap.dedent(program)]
    done = subprocess.run(run, env=environment, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    devices, first, *others = map(float, done.stdout.split())
    assert devices == 8
    np.testing.assert_allclose(others, [first] * 5, rtol=1e-4)
