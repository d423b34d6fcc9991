"""vmap and several devices, for the operands that act on each pair: bias, mask, ids, slopes, sinks, and dropout.

A transformed call and its gradients against the same call made plainly: a loop, or one device. Eight CPU devices.
"""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import attention

pytestmark = pytest.mark.usefixtures("on_cpu")

B, T, S, N, K, D = 4, 7, 9, 8, 4, 5
NAMES = ("query", "key", "value", "bias", "mask", "query_ids", "key_ids", "alibi_slopes", "sinks", "dout", "dlse")
SHAPES = {
    "query": (B, T, N, D),
    "key": (B, S, K, D),
    "value": (B, S, K, D),
    "bias": (B, N, T, S),
    "mask": (B, N, T, S),
    "query_ids": (B, T),
    "key_ids": (B, S),
    "alibi_slopes": (B, N),
    "sinks": (B, N),
    "dout": (B, T, N, D),
    "dlse": (B, T, N),
}
SHARED = {"bias": (1, N, T, 1), "mask": (1, 1, T, S), "alibi_slopes": (1, N), "sinks": (1, N)}
SHARED_BY_HEADS = {"bias": (B, 1, T, S), "mask": (B, 1, 1, S), "alibi_slopes": (B, 1), "sinks": (B, 1)}


def _random(seed, name, shape):
    rng = np.random.default_rng([seed, *name.encode()])
    if name == "mask":
        return jnp.asarray(rng.random(shape) > 0.3)
    if name.endswith("ids"):
        return jnp.asarray(np.sort(rng.integers(-1, 3, shape), -1), jnp.int32)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _arguments(seed=0, **shapes):
    return [_random(seed, name, shape) for name, shape in (SHAPES | shapes).items()]


def _gradients(query, key, value, bias, mask, query_ids, key_ids, alibi_slopes, sinks, dout, dlse, rng=None):
    """out, lse and every gradient; where lse is -inf it becomes 0."""

    def call(query, key, value, bias, alibi_slopes, sinks):
        return attention(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=True,
            causal_alignment="bottom_right",
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            dropout_rate=0.0 if rng is None else 0.3,
            dropout_rng=rng,
            return_residual=True,
        )

    (out, lse), pullback = jax.vjp(call, query, key, value, bias, alibi_slopes, sinks)
    return out, jnp.where(jnp.isneginf(lse), 0, lse), *pullback((dout, dlse))


def _near(got, want):
    calls.assert_close([np.asarray(x) for x in got], [np.asarray(x) for x in want], jnp.float32)


# vmap. Operands in the order of NAMES.

_ = None
AXES = {
    "all": (0,) * 11,
    "as equinox maps": (0, 0, 0, _, _, _, _, _, _, 0, 0),
    "before the heads": (2, 2, 2, _, _, _, _, _, _, 2, 1),
    "operands alone": (_, _, _, 0, 1, _, 0, 1, 0, _, _),
    "anywhere": (3, 0, 2, 4, 2, 1, _, 2, 1, 1, 0),
}


@pytest.mark.parametrize("shapes", [{}, SHARED], ids=["full", "shared"])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES.keys())
def test_vmap(axes, shapes):
    size = 3
    args = []
    for name, axis in zip(NAMES, axes, strict=True):
        shape = list((SHAPES | shapes)[name])
        if axis is not None:
            shape.insert(axis, size)
        args.append(_random(1, name, shape))
    plain = jax.jit(_gradients)
    rows = [plain(*(x if a is None else x.take(i, a) for x, a in zip(args, axes, strict=True))) for i in range(size)]
    _near(jax.jit(jax.vmap(_gradients, axes))(*args), [np.stack(xs) for xs in zip(*rows, strict=True)])


@pytest.mark.parametrize("axis", [0, None], ids=["own", "shared"])
@pytest.mark.parametrize("shape", [(1, 1, T, S), (B, 1, T, S)], ids=str)
def test_vmap_of_the_gradient_of_a_sum(shape, axis):
    """The cotangent lacks the axis, the bias has one head for all, and perhaps lacks the axis too."""
    xs = [_random(7, name, (3, *SHAPES[name])) for name in ("query", "key", "value")]
    bias = _random(7, "bias", shape if axis is None else (3, *shape))

    def loss(bias, *xs):
        return jnp.sum(attention(*xs, bias))

    run = jax.value_and_grad(loss, (0, 1, 2, 3))
    rows = [jax.jit(run)(bias if axis is None else bias[i], *(x[i] for x in xs)) for i in range(3)]
    want = jax.tree.map(lambda *x: np.stack(x), *rows)
    calls.assert_close(jax.jit(jax.vmap(run, (axis, 0, 0, 0)))(bias, *xs), want, jnp.float32)


def test_gradient_of_a_vmap_sums_over_what_is_shared():
    xs = [_random(2, name, (3, *SHAPES[name])) for name in ("query", "key", "value")]
    bias = _random(2, "bias", (1, N, 1, S))

    def mapped(bias):
        return jnp.sum(jnp.sin(jax.vmap(lambda *xs: attention(*xs, bias))(*xs)))

    def looped(bias):
        return sum(jnp.sum(jnp.sin(attention(*(x[i] for x in xs), bias))) for i in range(3))

    _near([jax.jit(jax.grad(mapped))(bias)], [jax.jit(jax.grad(looped))(bias)])


WRAPS = {
    "grad": lambda loss: loss,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda loss: lambda query, *xs: jax.vmap(lambda x: loss(x, *xs))(query[None]).sum(),
    "scan": lambda loss: lambda *xs: jax.lax.scan(lambda sum, _: (sum + loss(*xs) / 2, None), 0.0, length=2)[0],
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_operands_that_are_constants_have_no_gradient(wrap):
    """Not even one that nobody looks at: of a bias it would be T x S numbers."""
    query, key, value, bias, _, _, _, slopes, sinks, dout, _ = _arguments(7)
    names, xs = ("query", "bias", "alibi_slopes", "sinks"), (query, bias, slopes, sinks)

    def loss(query, bias, slopes, sinks):
        call = {"alibi_slopes": slopes, "sinks": sinks, "causal_alignment": "top_left"}
        return jnp.sum(attention(query, key, value, bias, **call) * dout)

    want = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*xs)
    for moving in ((0,), (0, 2), (0, 1, 2, 3)):
        gradient = jax.grad(wrap(loss), moving)
        found = calls.equations(jax.make_jaxpr(gradient)(*xs))
        (backward,) = [x for x in found if str(x.primitive) == "flash_backward"]
        assert backward.params["fixed"] == tuple(name for i, name in enumerate(names) if i not in moving)
        assert len(backward.outvars) == 2 + len(moving)
        _near(jax.jit(gradient)(*xs), [want[i] for i in moving])


def test_operands_in_the_carry_of_a_scan():
    """Also those without a gradient are traced: kept as if they were static, they would leak out of the loop."""
    query, *_, dout, _ = _arguments(8)
    _, _, _, bias, mask, query_ids, key_ids, slopes, sinks, _, _ = _arguments(8)
    key, value = (_random(8, name, SHAPES["key"]) for name in ("key", "value"))

    def step(carry, _):
        x, (bias, mask, query_ids, key_ids, slopes, sinks), rng = carry
        rng, used = jax.random.split(rng)
        x = attention(
            x,
            key,
            value,
            bias,
            mask,
            causal_alignment="bottom_right",
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
            alibi_slopes=slopes,
            sinks=sinks,
            dropout_rate=0.3,
            dropout_rng=used,
        )
        return (x, (2 * bias, ~mask, query_ids - 1, key_ids - 1, -slopes, sinks + 1), rng), None

    def loss(query, floating, scanned):
        bias, slopes, sinks = floating
        carry = query, (bias, mask, query_ids, key_ids, slopes, sinks), jax.random.key(0)
        if scanned:
            carry, _ = jax.lax.scan(step, carry, length=3)
        else:
            carry = functools.reduce(step_alone, range(3), carry)
        return jnp.sum(carry[0] * dout)

    def step_alone(carry, _):
        return step(carry, None)[0]

    with jax.check_tracer_leaks(True):
        got, want = (
            jax.jit(jax.grad(functools.partial(loss, scanned=x), (0, 1)))(query, (bias, slopes, sinks))
            for x in (True, False)
        )
    _near(jax.tree.leaves(got), jax.tree.leaves(want))


# Several devices.


def _mesh(kind):
    return jax.sharding.Mesh(
        np.asarray(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "model"), axis_types=(kind,) * 2
    )


def _spec(name, shape, data, model):
    """Batch over `data`, heads over `model`, where the operand has them."""
    heads = {
        "query": 2,
        "key": 2,
        "value": 2,
        "dout": 2,
        "dlse": 2,
        "bias": 1,
        "mask": 1,
        "alibi_slopes": 1,
        "sinks": 1,
    }
    spec = [None] * len(shape)
    spec[0] = data if shape[0] > 1 else None
    if name in heads and shape[heads[name]] > 1:
        spec[heads[name]] = model[0] if name in ("key", "value") and isinstance(model, tuple) else model
    return P(*spec)


SPLITS = {
    "batch": ("data", None),
    "heads": (None, "model"),
    "both": ("data", "model"),
    "more than key heads": (None, ("data", "model")),
}


@pytest.mark.parametrize("shapes", [{}, SHARED, SHARED_BY_HEADS], ids=["full", "shared", "shared by heads"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_jit_over_split_arrays(split, shapes):
    """Auto axes. Each device has part of what shares an element of the bias: its gradient is their sum."""
    args, mesh = _arguments(3, **shapes), _mesh(AxisType.Auto)
    run = functools.partial(_gradients, rng=jax.random.key(1))
    want = jax.jit(run)(*args)
    specs = [_spec(name, x.shape, *split) for name, x in zip(NAMES, args, strict=True)]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    compiled = jax.jit(run).lower(*placed).compile()
    _near(compiled(*placed), want)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("shapes", [{}, SHARED], ids=["full", "shared"])
def test_explicit_axes(shapes):
    args, mesh = _arguments(4, **shapes), _mesh(AxisType.Explicit)
    want = jax.jit(_gradients)(*args)
    with jax.set_mesh(mesh):
        specs = [_spec(name, x.shape, "data", "model") for name, x in zip(NAMES, args, strict=True)]
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        _near(jax.jit(_gradients)(*placed), want)


@pytest.mark.parametrize("shapes", [{}, SHARED], ids=["full", "shared"])
def test_explicit_axes_of_query_key_and_value_alone(shapes):
    """Operands that lie whole on each device, as parameters do: so must their gradients."""
    args, mesh = _arguments(4, **shapes), _mesh(AxisType.Explicit)
    want = jax.jit(_gradients)(*args)
    whole = ("bias", "mask", "query_ids", "key_ids", "alibi_slopes", "sinks")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, P() if name in whole else _spec(name, x.shape, "data", "model")))
            for name, x in zip(NAMES, args, strict=True)
        ]
        got = jax.jit(_gradients)(*placed)
    _near(got, want)
    assert got[2].sharding.spec == placed[0].sharding.spec
    assert all(x.sharding.is_fully_replicated for x in got[5:])


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_a_shard_map(check_vma):
    args, mesh = _arguments(5, **SHARED), _mesh(AxisType.Auto)
    specs = tuple(_spec(name, x.shape, "data", "model") for name, x in zip(NAMES, args, strict=True))

    def loss(query, key, value, bias, mask, query_ids, key_ids, alibi_slopes, sinks, dout, dlse):
        rest = {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
        options = {"causal_alignment": "top_left", "alibi_slopes": alibi_slopes, "sinks": sinks}
        return jnp.sum(attention(query, key, value, bias, mask, **rest, **options) * dout)

    def total(*xs):
        return jax.lax.psum(loss(*xs), ("data", "model"))

    sharded = jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    which = (0, 1, 2, 3, 7, 8)
    _near(jax.jit(jax.grad(sharded, which))(*args), jax.jit(jax.grad(loss, which))(*args))


def test_bias_in_a_shard_map_over_some_axes():
    """Inside, the devices of the other axes are not known: what would have to be summed over them is not cut there."""
    args, mesh = _arguments(6, **SHARED_BY_HEADS), _mesh(AxisType.Auto)
    want = jax.jit(_gradients)(*args)
    specs = tuple(_spec(name, x.shape, "data", None) for name, x in zip(NAMES, args, strict=True))
    outs = tuple(
        specs[NAMES.index(n)] for n in ("dout", "dlse", "query", "key", "value", "bias", "alibi_slopes", "sinks")
    )
    sharded = jax.shard_map(_gradients, mesh=mesh, in_specs=specs, out_specs=outs, axis_names={"data"}, check_vma=False)
    placed = [
        jax.device_put(x, NamedSharding(mesh, _spec(name, x.shape, "data", "model")))
        for name, x in zip(NAMES, args, strict=True)
    ]
    _near(jax.jit(sharded)(*placed), want)
