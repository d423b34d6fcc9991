"""What XLA makes of a call whose arrays are split over devices: no collective, no copy, local shapes. From its HLO.

That the numbers are right is in test_sharding.py too; here they are compared where a cut could go wrong in silence.
Always on eight CPU devices, in a mesh of 2 x 4.
"""

import functools
import re

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

B, T, S, N, D, DV = 4, 7, 9, 8, 5, 3
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BATCH, HEADS, BOTH = P("data"), P(None, None, "model"), P("data", None, "model")


pytestmark = pytest.mark.usefixtures("on_cpu")


def _mesh(kind=AUTO):
    devices = np.asarray(jax.devices("cpu")[:8]).reshape(2, 4)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)


def _arguments(seed, heads=N, **shapes):
    """query, key, value, dout, dlse, and what else is given."""
    usual = {
        "query": (B, T, N, D),
        "key": (B, S, heads, D),
        "value": (B, S, heads, DV),
        "dout": (B, T, N, DV),
        "dlse": (B, T, N),
    }
    return [calls.random(seed, name, shape, jnp.float32) for name, shape in (usual | shapes).items()]


def _gradients(query, key, value, dout, dlse, **lengths):
    (out, lse), pullback = jax.vjp(lambda *xs: calls.output(*xs, **lengths), query, key, value)
    return out, lse, *pullback((dout, dlse))


def _compile(function, args, specs, mesh):
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        compiled = jax.jit(function).lower(*placed).compile()
        return compiled.as_text(), compiled(*placed)


def _count(text, *names):
    found = re.findall(r" ([a-z0-9-]+?)(?:-start)?\(", text)
    return {name: found.count(name) for name in names if name in found}


def _kernels(text):
    """For each custom call its operands' shapes, as text."""
    lines = [line for line in text.splitlines() if 'custom_call_target="jax_flash2' in line]
    sides = [re.search(r"custom-call\((.*?)\), custom_call_target", line).group(1) for line in lines]
    defined = dict(re.findall(r"%?([\w.-]+) = (\w+\[[\d,]*\])", text))
    shapes = [
        [defined[name.strip().lstrip("%").split(" ")[-1].lstrip("%")] for name in x.split(",")]
        for x in map(_bare, sides)
    ]
    return [[shape for shape in row if not shape.endswith("[0]")] for row in shapes]


def _bare(operands):
    """Without the types that some versions of XLA print before names."""
    return re.sub(r"/\*.*?\*/|\w+\[[\d,]*\](\{[\d,]*\})? ", "", operands)


def _f32(*shape):
    return f"f32[{','.join(map(str, shape))}]"


def _near(got, want):
    calls.assert_close([np.asarray(x) for x in got], [np.asarray(x) for x in want], jnp.float32)


def _local(spec, shape):
    sizes = {"data": 2, "model": 4, None: 1}
    return tuple(n // sizes[axis] for n, axis in zip(shape, (*spec, *[None] * len(shape)), strict=False))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("heads", [8, 4])
@pytest.mark.parametrize("spec", [BATCH, HEADS, BOTH], ids=["batch", "heads", "batch and heads"])
def test_no_collective_and_no_copy(spec, heads, kind):
    """Forward and gradient, GQA too: each device runs both kernels on its own piece, and nothing moves."""
    args = _arguments(0, heads)
    text, got = _compile(_gradients, args, [spec] * 5, _mesh(kind))
    assert _count(text, *calls.COLLECTIVES, "dynamic-slice") == {}
    # [B, T, N] of the residual is [B, N, T] inside: its transposes are ours, of one number a row.
    moved = [line for line in text.splitlines() if re.search(r" (copy|transpose)\(", line)]
    assert all(re.search(r"f32\[\d+,\d+,\d+\]", line) for line in moved), moved
    shapes = [_local(spec, x.shape) for x in args]
    (q, k, v, dout, dlse), lse = [_f32(*x) for x in shapes], _f32(*(shapes[4][i] for i in (0, 2, 1)))
    assert dlse
    forward, backward = _kernels(text)
    assert forward == [q, k, v]
    assert backward == [q, k, v, dout, lse, dout, lse]
    for x in got:
        assert x.sharding.is_equivalent_to(NamedSharding(_mesh(kind), spec), x.ndim)
    _near(got, jax.jit(_gradients)(*args))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_no_collective_inside_a_partially_manual_shard_map(kind):
    """Batch by shard_map, heads by XLA; no gather but JAX's own around any such shard_map (0.10 has some)."""
    args = _arguments(1)
    mesh = {"mesh": _mesh()} if kind is AUTO else {}

    def compiled(function):
        split = jax.shard_map(function, **mesh, in_specs=(BATCH,) * 5, out_specs=(BATCH,) * 5, axis_names={"data"})
        return _compile(split, args, [BOTH] * 5, _mesh(kind))

    text, got = compiled(_gradients)
    around, _ = compiled(lambda *xs: tuple(jnp.cumsum(x, 1) for x in xs))
    assert _count(text, *calls.COLLECTIVES) == _count(around, *calls.COLLECTIVES)
    forward, _ = _kernels(text)
    assert forward == [_f32(2, T, 2, D), _f32(2, S, 2, D), _f32(2, S, 2, DV)]
    _near(got, jax.jit(_gradients)(*args))


def test_no_collective_in_a_scan_of_layers():
    """With recomputation, as a training step has it: the only sum over devices is the loss's."""
    query, key, value = (x[:, :T] for x in _arguments(2)[:3])
    value = key

    def loss(query, key, value):
        @functools.partial(jax.checkpoint)
        def layer(x, _):
            return calls.output(x, key, value, return_residual=False), None

        return jax.lax.scan(layer, query, length=2)[0]

    def step(query, key, value, dout):
        return jax.vjp(loss, query, key, value)[1](dout)

    args = [query, key, value, query]
    text, got = _compile(step, args, [BOTH] * 4, _mesh())
    assert _count(text, *calls.COLLECTIVES) == {}
    _near(got, jax.jit(step)(*args))


def test_vmapped_axis_that_is_split():
    """vmap adds an axis in front; it may be the one that is split, or stand before a batch that is."""
    args = [jnp.stack([x, 2 * x]) for x in _arguments(3)]
    mapped = jax.vmap(_gradients)
    for spec in (P("data"), P(None, "data"), P("data", None, None, "model"), P(None, "data", None, "model")):
        text, got = _compile(mapped, args, [spec] * 5, _mesh())
        assert _count(text, *calls.COLLECTIVES) == {}, spec
        _near(got, jax.jit(mapped)(*args))


# What is shared, and what does not divide.


@pytest.mark.parametrize("spec", [BATCH, HEADS, BOTH], ids=["batch", "heads", "batch and heads"])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_lengths_and_scale_of_size_one_are_bitwise_the_unsharded(spec, kind):
    """A size-1 axis beside a split batch must not be cut like it, or all shards but the first read something else."""
    args = _arguments(4, scale=(1,), query_lens=(1,), key_lens=(1,))

    def gradients(query, key, value, dout, dlse, scale, query_lens, key_lens):
        return calls.gradients(query, key, value, scale, query_lens, key_lens, dout, dlse)

    text, got = _compile(gradients, args, [spec] * 5 + [P()] * 3, _mesh(kind))
    assert _count(text, "all-gather", "all-to-all", "collective-permute") == {}
    *want, want_scale = jax.jit(gradients)(*args)
    *got, got_scale = got
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    _near([got_scale], [want_scale])  # a sum over devices, in another order


def test_vmapped_operands_that_are_shared():
    """vmap leaves keys with a batch axis of size 1 beside a split one; lengths differ by the other axis."""
    query, key, value, dout, dlse, lens = _arguments(5, key_lens=(2,))
    query, dout, dlse = (jnp.stack([x, x + 1, x, x - 1]) for x in (query, dout, dlse))

    def gradients(query, key, value, dout, dlse, lens):
        return _gradients(query, key, value, dout, dlse, key_value_seq_lengths=jnp.repeat(lens, 2))

    mapped = jax.vmap(gradients, (0, None, None, 0, 0, None))
    args = [query, key, value, dout, dlse, lens]
    specs = [P("model", "data"), P("data"), P("data"), P("model", "data"), P("model", "data"), P()]
    text, got = _compile(mapped, args, specs, _mesh())
    assert _count(text, *calls.COLLECTIVES) == {}
    assert [_f32(1, 2, T, N, D), _f32(1, 2, S, N, D), _f32(1, 2, S, N, DV)] == _kernels(text)[0][:3]
    _near(got, jax.jit(mapped)(*args))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [HEADS, BOTH], ids=["heads", "batch and heads"])
@pytest.mark.parametrize("heads", [1, 2])
def test_fewer_key_heads_than_shards(heads, spec, kind):
    """Query heads of one key head stand on several devices: each has the key head that they read, whose gradient is
    summed over them. Nothing of the queries moves."""
    args = _arguments(6, heads)
    shared = P(*spec[:1])
    text, got = _compile(_gradients, args, [spec, shared, shared, spec, spec], _mesh(kind))
    assert _count(text, "all-to-all", "collective-permute", "reduce-scatter") == {}
    forward, backward = _kernels(text)
    local = (B // 2 if spec is BOTH else B, T, N // 4, D)
    assert forward[0] == backward[0] == _f32(*local)
    assert forward[1] == _f32(local[0], S, 1, D)
    gathered = [line for line in text.splitlines() if " all-gather" in line]
    assert not [line for line in gathered if f",{T}," in line.split("all-gather")[0]], gathered
    _near(got, jax.jit(_gradients)(*args))


@pytest.mark.parametrize(
    ("query_heads", "heads", "axes"), [(6, 3, "data"), (12, 6, "model"), (8, 4, ("data", "model"))]
)
def test_heads_that_do_not_divide(query_heads, heads, axes):
    """Cutting between the heads of a group would pair them with other key heads."""
    shapes = {"query": (B, T, query_heads, D), "dout": (B, T, query_heads, DV), "dlse": (B, T, query_heads)}
    args = _arguments(7, heads, **shapes)
    spec = P(None, None, axes)
    _, got = _compile(_gradients, args, [spec, P(), P(), spec, spec], _mesh())
    _near(got, jax.jit(_gradients)(*args))


def test_fewer_key_heads_than_shards_inside_a_partially_manual_shard_map():
    args = _arguments(8, 2)
    specs = (BATCH,) * 5
    function = jax.shard_map(_gradients, mesh=_mesh(), in_specs=specs, out_specs=specs, axis_names={"data"})
    _, got = _compile(function, args, [BOTH, BATCH, BATCH, BOTH, BOTH], _mesh())
    _near(got, jax.jit(_gradients)(*args))


# Lengths and head dims.


@pytest.mark.parametrize("axis", [1, 3], ids=["length", "head dim"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_split_lengths_are_gathered_in_an_auto_mesh(which, axis):
    shapes = {
        "query": (B, 8, N, 8),
        "key": (B, 8, N, 8),
        "value": (B, 8, N, 8),
        "dout": (B, 8, N, 8),
        "dlse": (B, 8, N),
    }
    args = _arguments(9, **shapes)
    specs = [P()] * 5
    specs[which] = P(*[None] * axis, "model")
    text, got = _compile(_gradients, args, specs, _mesh())
    assert "all-gather" in _count(text, "all-gather")
    assert [x.shape for x in got] == [x.shape for x in jax.eval_shape(_gradients, *args)]
    _near(got, jax.jit(_gradients)(*args))


@pytest.mark.parametrize(("which", "name", "axis", "letter"), [(0, "q", 1, "T"), (1, "k", 1, "S"), (2, "v", 3, "V")])
def test_split_lengths_are_refused_in_an_explicit_mesh(which, name, axis, letter):
    args = [jnp.ones((B, 8, N, 8)) for _ in range(3)]
    specs = [P()] * 3
    specs[which] = P(*[None] * axis, "model")
    with pytest.raises(NotImplementedError, match=f"{name} .* is split along {letter} over 'model'.*reshard"):
        _compile(calls.output, args, specs, _mesh(EXPLICIT))


@pytest.mark.parametrize("spec", [HEADS, P(None, "model"), P("model")], ids=["heads", "length", "batch"])
def test_cotangent_that_is_split_otherwise(spec):
    """The output is constrained to another split than the operands: the gradient must still be of one cut."""
    args = _arguments(10, query=(B, 8, N, D))[:3]
    mesh = _mesh()

    def loss(query, key, value):
        out = calls.output(query, key, value, return_residual=False)
        out = jax.lax.with_sharding_constraint(out, NamedSharding(mesh, spec))
        return jnp.sum(jnp.sin(out))

    gradient = jax.grad(loss, (0, 1, 2))
    _, got = _compile(gradient, args, [BATCH] * 3, mesh)
    _near(got, jax.jit(gradient)(*args))


def test_pmap():
    args = [x.reshape(2, 2, *x.shape[1:]) for x in _arguments(11)]
    mapped = jax.pmap(_gradients, devices=jax.devices("cpu")[:2])
    _near(mapped(*args), jax.vmap(_gradients)(*args))


def test_two_meshes_in_one_program():
    """Two names for the same devices: each call is cut by its own."""
    args = _arguments(12)
    other = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:8]), ("x",))
    placed = [jax.device_put(x, NamedSharding(_mesh(), BOTH)) for x in args]
    more = [jax.device_put(x, NamedSharding(other, P(None, None, "x"))) for x in args]

    @jax.jit
    def both(xs, ys):
        return _gradients(*xs), _gradients(*ys)

    text = both.lower(placed, more).compile().as_text()
    assert _count(text, *calls.COLLECTIVES) == {}
    want = jax.jit(_gradients)(*args)
    for got in both(placed, more):
        _near(got, want)


@pytest.mark.parametrize("manual", [False, True], ids=["jit", "partially manual shard_map"])
def test_compiling_for_an_abstract_mesh(manual):
    """Needs no device, and no array."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, BOTH)) for x in _arguments(13)]
    function = _gradients
    if manual:
        specs = (BATCH,) * 5
        function = jax.shard_map(_gradients, mesh=mesh, in_specs=specs, out_specs=specs, axis_names={"data"})
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
    assert text.count("CustomSPMDPartitioning") == 2


@pytest.mark.parametrize("spec", [BATCH, HEADS, BOTH], ids=["batch", "heads", "batch and heads"])
def test_second_derivatives_in_an_explicit_mesh(spec):
    """They are jax.numpy, whose reshapes and sums have types there."""
    args = _arguments(14, 4)[:3]

    def product(*xs):
        return jax.jvp(jax.grad(lambda *xs: jnp.sum(jnp.sin(calls.output(*xs)[0])), (0, 1, 2)), xs, xs)[1]

    _, got = _compile(product, args, [spec] * 3, _mesh(EXPLICIT))
    for x in got:
        assert x.sharding.is_equivalent_to(NamedSharding(_mesh(EXPLICIT), spec), x.ndim)
    _near(got, jax.jit(product)(*args))
