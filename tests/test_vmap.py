"""vmap of any subset of operands, at any axis, nested, around and under gradients: a loop's result, without copies."""

import math
import random as pyrandom

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

SIZE = 4  # of the vmapped axis: differs from every other dim

_plain = jax.jit(calls.gradients)


def _loop(function, in_axes, out_axes=0):
    """What vmap does, spelled out, in numpy so that nothing but `function` is compiled."""

    def looped(*args):
        pairs = list(zip(map(np.asarray, args), in_axes, strict=True))
        size = next(x.shape[axis] for x, axis in pairs if axis is not None)
        rows = [function(*(x if axis is None else x.take(i, axis) for x, axis in pairs)) for i in range(size)]
        return jax.tree.map(lambda *xs: np.stack(xs, out_axes), *rows)

    return looped


def _arguments(seed, *levels):
    """Arguments with an axis more for each level's in_axes, the innermost level's being added first."""
    args = []
    for i, name in enumerate(calls.NAMES):
        shape = list(calls.SHAPES[name])
        for number, in_axes in enumerate(levels):
            if in_axes[i] is not None:
                shape.insert(in_axes[i], SIZE + number * 6)
        args.append(calls.random(seed, name, tuple(shape)))
    return args


# In the order query, key, value, scale, query_lens, key_lens, dout, dlse.
_ = None
CASES = {
    "query": (0, _, _, _, _, _, _, _),
    "key": (_, 0, _, _, _, _, _, _),
    "value": (_, _, 1, _, _, _, _, _),
    "scale": (_, _, _, 1, _, _, _, _),
    "lengths": (_, _, _, _, 0, 1, _, _),
    "cotangents only": (_, _, _, _, _, _, 1, 0),
    "one cotangent": (_, _, _, _, _, _, _, 2),
    "all in front": (0, 0, 0, 0, 0, 0, 0, 0),
    "all behind the batch": (1, 1, 1, 1, 1, 1, 1, 1),
    "before the heads": (2, 2, 2, _, _, _, _, _),
    "before the heads, with cotangents": (2, 2, 2, _, _, _, 2, 1),
    "before the heads, cotangents elsewhere": (2, 2, 2, _, _, _, 0, 3),
    "before the heads, with lengths": (2, 2, 2, _, 0, 1, 2, 2),
    "behind grouped heads": (3, 3, 3, _, _, _, 3, 3),
    "last": (4, 4, 4, 1, 1, 1, 4, 3),
    "all different": (4, 2, 0, 1, 0, 1, 3, 0),
}


@pytest.mark.parametrize("in_axes", CASES.values(), ids=CASES.keys())
def test_vmap_of_a_gradient(in_axes):
    args = _arguments(0, in_axes)
    calls.assert_close(jax.jit(jax.vmap(calls.gradients, in_axes))(*args), _loop(_plain, in_axes)(*args))


@pytest.mark.parametrize("which", range(1, 32), ids=lambda which: f"{which:05b}")
def test_every_subset_of_operands(which):
    """Of query, key, value, scale and lengths, values and gradients, against a loop; an operand's axis is its own."""
    mapped = [which >> i & 1 == 1 for i in (4, 3, 2, 1, 0, 0)]
    axes = [0, 2, 1, 0, 0, 0]
    in_axes = (*(axis if on else None for axis, on in zip(axes, mapped, strict=True)), None, 0)
    args = _arguments(10, in_axes)
    calls.assert_close(jax.jit(jax.vmap(calls.gradients, in_axes))(*args), _loop(_plain, in_axes)(*args))


def _random_axes(rng, levels_inside):
    in_axes = [rng.choice([_, rng.randint(0, len(calls.SHAPES[name]) + levels_inside[name])]) for name in calls.NAMES]
    return tuple(in_axes) if any(axis is not _ for axis in in_axes) else _random_axes(rng, levels_inside)


@pytest.mark.parametrize("seed", range(4))
def test_nested_vmaps(seed):
    rng = pyrandom.Random(seed)
    inner = _random_axes(rng, dict.fromkeys(calls.NAMES, 0))
    outer = _random_axes(rng, {name: int(axis is not _) for name, axis in zip(calls.NAMES, inner, strict=True)})
    args = _arguments(seed, inner, outer)
    nested = jax.jit(jax.vmap(jax.vmap(calls.gradients, inner), outer, out_axes=1))
    calls.assert_close(nested(*args), _loop(_loop(_plain, inner), outer, out_axes=1)(*args))


def test_more_nested_vmaps_than_batch_axes_the_kernels_count():
    """Each leaves out other operands than its neighbours, so that no two axes merge."""
    levels = [(0, _, _), (_, 0, _), (0, _, _), (_, _, 0), (0, _, _), (_, 0, 0)]
    shapes = [list(calls.SHAPES[name]) for name in ("query", "key", "value")]
    nested, looped = _out, jax.jit(_out)
    for in_axes in levels:
        nested, looped = jax.vmap(nested, in_axes), _loop(looped, in_axes)
        for shape, axis in zip(shapes, in_axes, strict=True):
            if axis is not None:
                shape.insert(0, 2)
    args = [calls.random(3, name, tuple(shape)) for name, shape in zip(("query", "key", "value"), shapes, strict=True)]
    calls.assert_close(jax.jit(nested)(*args), looped(*args))


def test_gradient_of_a_vmap():
    """What is shared between rows gets the sum of their gradients."""
    in_axes = (0, _, 1, _, 0, _)
    args = _arguments(5, (*in_axes, 0, 0))
    *operands, dout, dlse = args

    def one(*xs):
        return calls.output(*xs[:4], query_seq_lengths=xs[4], key_value_seq_lengths=xs[5])

    def loss(*xs):
        out, lse = jax.vmap(one, in_axes)(*xs, *operands[4:])
        return jnp.sum((out * dout).astype(jnp.float32)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse * dlse))

    rows = _loop(_plain, (*in_axes, 0, 0))(*args)[2:]
    want = [rows[0], rows[1].sum(0), np.moveaxis(rows[2], 0, 1), rows[3].sum(0)]
    calls.assert_close(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*operands[:4]), want)


def test_jacobian():
    """Rows of jax.jacrev are pullbacks of unit vectors: a vmap over cotangents, of residuals that lack the axis."""
    query, key, value, scale, query_lens, key_lens, dout, dlse = calls.arguments(6)

    def out(*xs):
        return calls.output(*xs, query_seq_lengths=query_lens, key_value_seq_lengths=key_lens)[0][1, 5, 2:4]

    rows = jax.jit(jax.jacrev(out, (0, 1, 2, 3)))(query, key, value, scale)
    for n in range(2):
        for d in range(0, calls.DV, 3):
            unit = jnp.zeros_like(dout).at[1, 5, 2 + n, d].set(1)
            pulled = _plain(query, key, value, scale, query_lens, key_lens, unit, jnp.zeros_like(dlse))[2:]
            calls.assert_close([row[n, d] for row in rows], pulled)


# What a vmapped call does beside its kernel. A reshape that adds size-1 axes or joins neighbours is free, a transpose
# or a broadcast that grows is a copy.


def _copies(function, *args):
    found = []
    for equation in calls.equations(jax.make_jaxpr(function)(*args)):
        name, sizes = str(equation.primitive), [math.prod(x.aval.shape) for x in (*equation.invars, *equation.outvars)]
        if name == "transpose" or (name == "broadcast_in_dim" and sizes[-1] > max(1, *sizes[:-1])):
            found.append(name)
    return found


def _kernel_shapes(function, *args):
    return [
        [x.aval.shape for x in equation.invars]
        for equation in calls.equations(jax.make_jaxpr(function)(*args))
        if str(equation.primitive).startswith("flash_")
    ]


def _out(*xs):
    return calls.output(*xs, return_residual=False)


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, 0), (1, 1, None), (1, 1, 1), (None, None, 1)])
def test_nothing_is_copied(in_axes):
    args = [
        calls.random(7, name, _with_axis(calls.SHAPES[name], axis))
        for name, axis in zip(("query", "key", "value"), in_axes, strict=True)
    ]
    axis = next(axis for axis in in_axes if axis is not None)
    mapped = jax.vmap(_out, in_axes, out_axes=axis)
    assert _copies(mapped, *args) == []
    dout = calls.random(7, "dout", _with_axis(calls.SHAPES["dout"], axis))

    def pulled(*xs):
        return jax.vjp(mapped, *xs)[1](dout)

    assert "transpose" not in _copies(pulled, *args)


def _with_axis(shape, axis):
    return shape if axis is None else (*shape[:axis], SIZE, *shape[axis:])


@pytest.mark.parametrize(
    ("key_heads", "axis", "joins"),
    [(calls.K, 1, True), (calls.N, 1, True), (calls.N, 2, True), (calls.K, 2, False)],
    ids=["before grouped heads", "before the heads", "behind the heads", "behind grouped heads"],
)
def test_axis_beside_the_heads_joins_them(key_heads, axis, joins):
    """As equinox.nn.MultiheadAttention vmaps: over heads, with in_axes=1. Behind grouped heads it would tear groups."""
    shapes = [(calls.T, calls.N, calls.D), (calls.S, key_heads, calls.D), (calls.S, key_heads, calls.DV)]
    names = ("query", "key", "value")
    args = [calls.random(8, name, _with_axis(shape, axis)) for name, shape in zip(names, shapes, strict=True)]
    dout = calls.random(8, "dout", _with_axis((calls.T, calls.N, calls.DV), axis))

    def pulled(q, k, v, dout):
        out, pullback = jax.vjp(_out, q, k, v)
        return out, *pullback(dout)

    mapped = jax.vmap(pulled, axis, axis)
    calls.assert_close(jax.jit(mapped)(*args, dout), _loop(jax.jit(pulled), (axis,) * 4, axis)(*args, dout))
    (forward, backward) = _kernel_shapes(mapped, *args, dout)
    assert len(forward[0]) == (3 if joins else 4)
    if joins:
        assert forward[0] == (calls.T, SIZE * calls.N, calls.D)
        assert backward[0] == forward[0]
        assert _copies(mapped, *args, dout) == []


def test_size_one_axis():
    args = [x[None] for x in calls.arguments(9)]
    calls.assert_close(jax.vmap(calls.gradients)(*args), [x[None] for x in _plain(*calls.arguments(9))])


def test_spmd_axis_name():
    """The vmapped axis is split over a mesh by name, and stays so inside: no collective."""
    cpus = np.asarray(jax.devices("cpu")[:SIZE])
    mesh = jax.sharding.Mesh(cpus, ("rows",))
    split = jax.sharding.NamedSharding(mesh, jax.P("rows"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    args = [jnp.stack([x] * SIZE) for x in calls.arguments(11)]

    def constrained(query, *rest):
        query = jax.lax.with_sharding_constraint(query * 1, whole)
        return calls.gradients(query, *rest)

    mapped = jax.jit(jax.vmap(constrained, spmd_axis_name="rows"))
    placed = [jax.device_put(x, split) for x in args]
    text = mapped.lower(*placed).compile().as_text()
    assert "all-gather" not in text
    assert "all-reduce" not in text
    got = mapped(*placed)
    calls.assert_close([np.asarray(x[-1]) for x in got], [np.asarray(x) for x in _plain(*calls.arguments(11))])
    assert all(x.sharding.is_equivalent_to(split, x.ndim) for x in got)


def test_vmap_of_value_and_grad_of_a_sum():
    """The cotangent of a sum is one number for all rows: it arrives without the axis."""
    args = [jnp.stack([x, 2 * x, -x]) for x in calls.arguments(12, "query", "key", "value")]

    def loss(*xs):
        return jnp.sum(_out(*xs).astype(jnp.float32))

    function = jax.value_and_grad(loss, (0, 1, 2))
    calls.assert_close(jax.jit(jax.vmap(function))(*args), _loop(jax.jit(function), (0, 0, 0))(*args))


def test_vmapped_stages_inside_a_scan():
    """A pipeline's stages as a vmapped axis of the carry, in another place on the way out."""
    query = jnp.stack(calls.arguments(13, "query") * 3, 1)
    stages = [jnp.stack(calls.arguments(13, name) * 3, 1) for name in ("key", "value")]

    def stage(x, key, value):
        return x + _out(x, key, value[..., : calls.D])

    def scanned(query):
        mapped = jax.vmap(stage, 1, 2)
        step = lambda x, _: (jnp.moveaxis(mapped(x, *stages), 2, 1), None)  # noqa: E731
        return jax.lax.scan(step, query, length=2)[0]

    want = query
    for _ in range(2):
        want = jnp.stack([stage(want[:, i], *(x[:, i] for x in stages)) for i in range(3)], 1)
    calls.assert_close(jax.jit(scanned)(query), want)
