"""Derivatives of gradients, and forward mode, against those of the oracle in plain jax.numpy; and what they cost.

In float64, where the kernels too are that accurate; on CPU, but for the tests that name a backend.
"""

import functools
import math

import calls
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_flash2
from jax_flash2 import _jvp, attention, attention_jvp
from jax_flash2._spec import AttentionSpec

NAMES = ("query", "key", "value", "scale")
# Each mask, alignment, kind of length and scale, cap and head layout; the first is longer than a block of keys.
CHOSEN = (
    "tiles-causal",
    "causal-bottom-right-tall",
    "window-left",
    "window-runs-out",
    "lengths-bottom-right",
    "scale-rows",
    "gqa",
    "two-batch-axes",
    "nan-past-lengths",
)
CASES = [case for case in cases.CASES if case.id in CHOSEN]


@pytest.fixture(autouse=True)
def _in_float64(request):
    backend = request.getfixturevalue("backend") if "backend" in request.fixturenames else "cpu"
    with jax.enable_x64(True), jax.default_device(jax.devices(backend)[0]):
        yield


def _arguments(case):
    """query, key, value, scale; one tangent for each, which is 0 where they may be NaN; what is left of the call."""
    arrays = case.arrays()
    operands = dict(case.operands)
    scale = operands.pop("scale", case.keywords.get("scale", 0.3))
    keywords = {name: x for name, x in case.keywords.items() if name != "scale"} | operands
    xs = [jnp.asarray(arrays[name], jnp.float64) for name in NAMES[:3]] + [jnp.asarray(scale, jnp.float32)]
    rng = np.random.default_rng(0)
    tangents = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in xs]
    return xs, [jnp.where(jnp.isfinite(x), t, 0) for x, t in zip(xs, tangents, strict=True)], keywords


def _call(keywords, implementation):
    def call(query, key, value, scale):
        out, lse = attention(
            query, key, value, scale=scale, return_residual=True, implementation=implementation, **keywords
        )
        return out, jnp.where(jnp.isneginf(lse), 0, lse)

    return call


def _loss(keywords, implementation):
    """Nowhere linear in what attention returns."""

    def loss(*xs):
        out, lse = _call(keywords, implementation)(*xs)
        return jnp.sum(jnp.sin(out + 0.5)) + jnp.sum(jnp.cos(lse))

    return loss


def _near(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        assert np.isfinite(np.asarray(x)).all()
        tolerance = 1e-9 if x.dtype == jnp.float64 else 1e-5  # the scale is float32
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1, float(jnp.abs(y).max())))


def _jvp_of_grad(loss, xs, tangents):
    return jax.jvp(jax.grad(loss, (0, 1, 2, 3)), xs, tangents)


def _grad_of_grad(loss, xs, tangents):
    def along(*xs):
        pairs = zip(jax.grad(loss, (0, 1, 2, 3))(*xs), tangents, strict=True)
        return sum(jnp.sum(g * t).astype(jnp.float64) for g, t in pairs)

    return jax.grad(along, (0, 1, 2, 3))(*xs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_second_derivatives(case, backend):
    """Forward over reverse and, of every other case, reverse over reverse, in every operand at once."""
    xs, tangents, keywords = _arguments(case)
    order = (_jvp_of_grad, _grad_of_grad)[CASES.index(case) % 2]
    got, want = (
        jax.jit(functools.partial(order, _loss(keywords, implementation)))(xs, tangents)
        for implementation in (None, "reference")
    )
    _near(got, want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_attention_jvp(case, backend):
    xs, tangents, keywords = _arguments(case)
    primal, tangent = jax.jit(lambda xs, tangents: attention_jvp(xs, tangents, return_residual=True, **keywords))(
        xs, tangents
    )
    plain = attention(*xs[:3], scale=xs[3], return_residual=True, **keywords)
    jax.tree.map(np.testing.assert_array_equal, primal, plain)
    _near(tangent, jax.jvp(_call(keywords, "reference"), xs, tangents)[1])


def _small():
    rng = np.random.default_rng(1)
    shapes = ((3, 2, 2), (4, 1, 2), (4, 1, 3))
    return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes] + [jnp.float32(0.7)]


CAUSAL = {"is_causal": True, "causal_alignment": "bottom_right", "logits_soft_cap": 1.5}


def test_hessian(backend):
    xs = _small()
    for argnums in (0, 1, (0, 2)):
        got, want = (jax.jit(jax.hessian(_loss(CAUSAL, i), argnums))(*xs) for i in (None, "reference"))
        _near(got, want)


def test_second_derivatives_equal_finite_differences(backend):
    *xs, scale = _small()
    check_grads(lambda *xs: _loss(CAUSAL, None)(*xs, scale), xs, order=2, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-5)


def test_third_derivative():
    xs = tuple(_small())
    tangents = tuple(jnp.ones_like(x) for x in xs)

    def twice(loss):
        def once(*xs):
            return jax.jvp(jax.grad(loss, (0, 1, 2, 3)), xs, tangents)[1]

        return jax.jvp(once, xs, tangents)[1]

    got, want = (jax.jit(lambda i=i: twice(_loss(CAUSAL, i)))() for i in (None, "reference"))
    _near(got, want)


def test_vmap_of_a_hessian_vector_product():
    xs = _small()
    query = jnp.stack([xs[0], 2 * xs[0], -xs[0]], 1)

    def product(query, *rest):
        return jax.jvp(jax.grad(lambda q: _loss(CAUSAL, None)(q, *rest)), [query], [jnp.ones_like(query)])[1]

    got = jax.jit(jax.vmap(product, (1, None, None, None), 2))(query, *xs[1:])
    _near(got, jnp.stack([product(query[:, i], *xs[1:]) for i in range(3)], 2))


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, None), (None, None, 0), (1, None, 2)])
def test_second_derivative_of_a_vmap(in_axes):
    """Operands without the axis have size 1 along it, in tangents too."""
    *xs, scale = _small()
    axis = [x if i is None else jnp.stack([x, 2 * x, -x], i) for x, i in zip(xs, in_axes, strict=True)]

    def product(implementation):
        def loss(*xs):
            mapped = jax.vmap(lambda *xs: _call(CAUSAL, implementation)(*xs, scale)[0], in_axes)
            return jnp.sum(jnp.sin(mapped(*xs)))

        return jax.jvp(jax.grad(loss, (0, 1, 2)), axis, axis)[1]

    got, want = (jax.jit(functools.partial(product, i))() for i in (None, "reference"))
    _near(got, want)


def test_hessian_vector_product_of_split_arrays():
    """XLA partitions the tangents too; inside shard_map they vary as their operands do."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "model"))
    spec = jax.P("data", None, "model")
    rng = np.random.default_rng(2)
    xs = [jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 5, 4, 3), (2, 140, 2, 3), (2, 140, 2, 4))]

    def product(*xs):
        def loss(*xs):
            return _loss({}, None)(*xs, 0.4)

        return jax.jvp(jax.grad(loss, (0, 1, 2)), xs, xs)[1]

    want = jax.jit(product)(*xs)
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in xs]
    _near(jax.jit(product)(*placed), want)
    for check_vma in (True, False):
        sharded = jax.shard_map(product, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3, check_vma=check_vma)
        _near(jax.jit(sharded)(*xs), want)


# attention_jvp, beside its numbers.


def test_tangents_of_some():
    """None does not move; the result's structure follows return_residual."""
    xs = _small()
    tangent = jnp.ones_like(xs[1])
    out, moved = attention_jvp(xs[:3], (None, tangent, None), scale=0.7)
    zeros = [jnp.zeros_like(xs[0]), tangent, jnp.zeros_like(xs[2])]
    want = jax.jvp(lambda *xs: attention(*xs, scale=0.7, implementation="reference"), xs[:3], zeros)
    _near((out, moved), want)


def test_attention_jvp_can_be_differentiated():
    xs = _small()

    def moved(implementation, *xs):
        tangents = [jnp.cos(x) for x in xs]
        out, tangent = attention_jvp(xs, tangents, implementation=implementation, **CAUSAL)
        return jnp.sum(jnp.sin(out) * tangent)

    got, want = (jax.jit(jax.grad(functools.partial(moved, i), (0, 1, 2, 3)))(*xs) for i in (None, "reference"))
    _near(got, want)


def test_reference_serves_other_keywords():
    xs = _small()[:3]
    mask = jnp.tri(3, 4, dtype=bool)[None]
    got = attention_jvp(xs, xs, mask=mask, implementation="reference")
    _near(got, jax.jvp(lambda *xs: attention(*xs, mask=mask, implementation="reference"), xs, xs))
    with pytest.raises(NotImplementedError, match="attention with mask has first derivatives in reverse mode alone"):
        attention_jvp(xs, xs, mask=mask)


def test_wrong_primals_and_tangents():
    xs = _small()
    with pytest.raises(ValueError, match=r"primals has 2 entries and tangents 2.*\(query, key, value\)"):
        attention_jvp(xs[:2], xs[:2])
    with pytest.raises(
        ValueError, match=r"the tangent of key is float64\[3, 1, 2\]; it must be as key, float64\[4, 1, 2\]"
    ):
        attention_jvp(xs, [xs[0], xs[1][:3], xs[2], None])
    with pytest.raises(TypeError, match="scale is both"):
        attention_jvp(xs, xs, scale=0.5)
    with pytest.raises(TypeError, match="causal"):
        attention_jvp(xs, xs, causal=True)


FORWARD_MODES = {
    "jvp": lambda xs: jax.jvp(attention, xs, xs),
    "jit of jvp": jax.jit(lambda xs: jax.jvp(attention, xs, xs)),
    "jvp of jit": lambda xs: jax.jvp(jax.jit(attention), xs, xs),
    "jacfwd": lambda xs: jax.jacfwd(lambda query: attention(query, *xs[1:]))(xs[0]),
    "linearize": lambda xs: jax.linearize(attention, *xs)[1](*xs),
    "vmap of jvp": lambda xs: jax.vmap(lambda *xs: jax.jvp(attention, xs, xs))(*(x[None] for x in xs)),
}


@pytest.mark.parametrize("function", FORWARD_MODES.values(), ids=FORWARD_MODES.keys())
def test_forward_mode_of_attention_itself_is_refused(function):
    """Wherever it is asked for: no tangent that is silently 0."""
    with pytest.raises(TypeError, match=r"forward-mode.*jvp"):
        jax.block_until_ready(function(_small()[:3]))


def test_what_has_no_second_derivative_says_so():
    with pytest.raises(NotImplementedError, match=r"attention with bias has first derivatives.*'reference'"):
        _jvp._check_served(("q", "k", "v", "bias"), AttentionSpec())


# What they cost.


def _large(T, S):
    return [jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32) for n in (T, S, S)]


def _largest(function, *args):
    """The most elements that one array of the program has, scan's stacked residuals and carries included."""
    sizes = (math.prod(v.aval.shape) for e in calls.equations(jax.make_jaxpr(function)(*args)) for v in e.outvars)
    return max(sizes)


def _scalar(*xs):
    return jnp.sum(jnp.sin(attention(*xs, is_causal=True)))


@pytest.mark.parametrize(
    "function",
    [
        lambda *xs: jax.jvp(jax.grad(_scalar, (0, 1, 2)), xs, xs),
        lambda *xs: jax.grad(lambda *xs: sum(jnp.sum(g**2) for g in jax.grad(_scalar, (0, 1, 2))(*xs)), (0, 1, 2))(*xs),
        lambda *xs: attention_jvp(xs, xs, is_causal=True),
        jax.grad(lambda *xs: jnp.sum(attention_jvp(xs, xs, is_causal=True)[1])),
    ],
    ids=["jvp of grad", "grad of grad", "attention_jvp", "grad of attention_jvp"],
)
def test_memory_grows_with_the_length_not_with_its_square(function):
    small, large = (_largest(function, *_large(T, T)) for T in (1024, 4096))
    assert large <= 4 * small
    assert large < 4096 * 4096 / 8


def test_reverse_mode_is_two_primitives():
    """A gradient costs what it did: one forward and one backward kernel, no block of keys in jax.numpy."""
    counts = calls.count(jax.grad(_scalar, (0, 1, 2)), *_large(256, 256))
    assert (counts["flash_forward"], counts["flash_backward"]) == (1, 1)
    assert not {"scan", "dot_general", "exp"} & set(counts)


def test_forward_mode_runs_one_kernel():
    counts = calls.count(lambda *xs: attention_jvp(xs, xs), *_large(64, 64))
    assert counts["flash_forward"] == 1
    assert "flash_backward" not in counts


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_hessian_vector_product_compiles_for(platform):
    """On CUDA too the first derivatives inside run on kernels, padded head dims included."""
    args = [jax.ShapeDtypeStruct((1, 9, 2, 12), jnp.bfloat16)] * 3

    def product(*xs):
        return jax.jvp(jax.grad(lambda *xs: jnp.sum(attention(*xs).astype(jnp.float32) ** 2), (0, 1, 2)), xs, xs)

    text = jax.jit(product).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert "jax_flash2_forward_v1" in text
    assert "jax_flash2_backward_v1" in text


def test_sixteen_bits(backend, device):
    """Tangents have their primals' dtype, and are as near to the oracle's as that allows."""
    xs = [jax.device_put(x, device) for x in calls.arguments(0, "query", "key", "value", dtype=jnp.bfloat16)]

    def loss(implementation, *xs):
        return jnp.sum(jnp.sin(attention(*xs, implementation=implementation).astype(jnp.float32)))

    got, want = (
        jax.jit(lambda *xs, i=i: jax.jvp(jax.grad(functools.partial(loss, i), (0, 1, 2)), xs, xs)[1])(*xs)
        for i in (None, "reference")
    )
    calls.assert_close(got, want, jnp.bfloat16)
    assert jax_flash2.attention_jvp(xs, xs)[1].dtype == jnp.bfloat16
