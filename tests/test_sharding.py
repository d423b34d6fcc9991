"""attention on several devices equals attention on one: shard_map, pmap, and jit over Auto and Explicit meshes.

Always on eight CPU devices. What is compared is the result and every gradient, that of what shards share included.
"""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

B, N, K = 4, 8, 4  # split over ("data", "model"), 4 x 2
SHAPES = {
    "query": (B, calls.T, N, calls.D),
    "key": (B, calls.S, K, calls.D),
    "value": (B, calls.S, K, calls.DV),
    "scale": (B,),
    "query_lens": (B,),
    "key_lens": (B,),
    "dout": (B, calls.T, N, calls.DV),
    "dlse": (B, calls.T, N),
}
BATCH = {name: P("data") for name in SHAPES}
HEADS = {name: P(None, None, "model") if len(shape) > 2 else P() for name, shape in SHAPES.items()}
BOTH = {name: P("data", None, "model") if len(shape) > 2 else P("data") for name, shape in SHAPES.items()}
SHARED_KEYS = BATCH | {"key": P(), "value": P()}
SPLITS = {"batch": BATCH, "heads": HEADS, "batch and heads": BOTH}


pytestmark = pytest.mark.usefixtures("on_cpu")


def _mesh(kind=AxisType.Auto):
    devices = np.asarray(jax.devices("cpu")[:8])
    assert devices.size == 8, "these tests need XLA_FLAGS=--xla_force_host_platform_device_count=8"
    return jax.sharding.Mesh(devices.reshape(4, 2), ("data", "model"), axis_types=(kind,) * 2)


def _arguments(seed, **shapes):
    return [calls.random(seed, name, shape, jnp.float32) for name, shape in (SHAPES | shapes).items()]


def _operands(seed):
    return _arguments(seed)[:3]


@functools.cache
def _whole():
    """The arguments and their results on one device."""
    args = _arguments(0)
    return args, [np.asarray(x) for x in jax.jit(calls.gradients)(*args)]


def _near(got, want):
    calls.assert_close([np.asarray(x) for x in got], [np.asarray(x) for x in want], jnp.float32)


def _results(split):
    """How the results of calls.gradients are split when each operand's gradient is split as the operand."""
    return tuple(split[name] for name in ("dout", "dlse", "query", "key", "value", "scale"))


# shard_map.


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("split", [BATCH, BOTH], ids=["batch", "batch and heads"])
def test_shard_map_around_a_gradient(split, check_vma):
    args, want = _whole()
    in_specs, out_specs = tuple(split.values()), _results(split)
    if split is BOTH:  # each shard's dscale is its own heads' share: leave the scale out
        in_specs, out_specs = in_specs[:3] + in_specs[4:], out_specs[:5]
        args, want = args[:3] + args[4:], jax.jit(_without_scale)(*args[:3], *args[4:])
    function = calls.gradients if split is BATCH else _without_scale
    sharded = jax.shard_map(function, mesh=_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    _near(jax.jit(sharded)(*args), want)


def _without_scale(query, key, value, *rest):
    return calls.gradients(query, key, value, jnp.float32(0.4), *rest)[:5]


def _sharded_loss(mesh, split, check_vma):
    """A function of the whole arrays, the sum over shards being psum'ed inside."""
    axes = tuple(mesh.axis_names)
    used = tuple(a for a in axes if any(a in jax.tree.leaves(tuple(spec)) for spec in split.values()))

    def loss(query, key, value, scale, query_lens, key_lens, dout, dlse):
        out, lse = calls.output(query, key, value, scale, query_seq_lengths=query_lens, key_value_seq_lengths=key_lens)
        total = jnp.sum(out * dout) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse * dlse))
        return jax.lax.psum(total, used)

    return jax.shard_map(loss, mesh=mesh, in_specs=tuple(split.values()), out_specs=P(), check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_gradient_of_a_shard_map(split, check_vma):
    """With heads split the scale is shared between shards: its gradient is their sum."""
    args, want = _whole()
    loss = _sharded_loss(_mesh(), split, check_vma)
    _near(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args), want[2:])


def test_keys_shared_between_shards_get_the_sum_of_their_gradients():
    """Every shard of the batch reads the same keys; inside, typed as varying, so that JAX inserts the psum."""
    args = _arguments(1, key=SHAPES["key"][1:], value=SHAPES["value"][1:])

    def gradients(query, key, value, scale, query_lens, key_lens, dout, dlse):
        def loss(query, key, value, scale):
            keys, values = (jnp.broadcast_to(x, (query.shape[0], *x.shape)) for x in (key, value))
            lens = {"query_seq_lengths": query_lens, "key_value_seq_lengths": key_lens}
            out, lse = calls.output(query, keys, values, scale, **lens)
            return jnp.sum(out * dout) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse * dlse))

        return jax.grad(loss, (0, 1, 2, 3))(query, key, value, scale)

    specs = tuple(SHARED_KEYS.values())
    sharded = jax.shard_map(gradients, mesh=_mesh(), in_specs=specs, out_specs=(P("data"), P(), P(), P("data")))
    _near(jax.jit(sharded)(*args), jax.jit(gradients)(*args))


def test_unvarying_keys_meet_varying_queries():
    """Nothing but attention makes key and value vary, and no batch axis is broadcast on the way."""
    query, key, value = _operands(2)
    dout = _arguments(2)[6]

    def gradients(query, key, value, dout):
        return jax.vjp(lambda *xs: calls.output(*xs, return_residual=False), query, key, value)[1](dout)

    in_specs = (P(None, None, "model"), P(), P(), P(None, None, "model"))
    sharded = jax.shard_map(
        gradients, mesh=_mesh(), in_specs=in_specs, out_specs=(in_specs[0], P(), P())
    )  # every shard's query heads read all key heads, so that the groups differ from the whole call's
    halves = [gradients(query[:, :, h], key, value, dout[:, :, h]) for h in (slice(0, 4), slice(4, 8))]
    want = (
        jnp.concatenate([x[0] for x in halves], 2),
        *(a + b for a, b in zip(halves[0][1:], halves[1][1:], strict=True)),
    )
    _near(jax.jit(sharded)(query, key, value, dout), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_key_head_shared_by_all_shards(check_vma):
    """One key head, whole on every shard, and queries split by heads: its gradient is summed over shards, once."""
    query, key, value = (x[:, :, :heads] for x, heads in zip(_operands(8), (N, 1, 1), strict=True))

    def loss(query, key, value):
        return jnp.sum(jnp.sin(calls.output(query, key, value, return_residual=False)))

    specs = (P(None, None, "model"), P(), P())
    sharded = jax.shard_map(
        lambda *xs: jax.lax.psum(loss(*xs), "model"), mesh=_mesh(), in_specs=specs, out_specs=P(), check_vma=check_vma
    )
    got, want = (jax.jit(jax.grad(f, (0, 1, 2)))(query, key, value) for f in (sharded, loss))
    _near(got, want)


def test_scan_inside_shard_map():
    """The carry's type, varying axes included, must be what attention returns."""
    query, key, value = _operands(3)
    key, value = key[..., : calls.D], value[..., : calls.D]

    def layers(query, key, value):
        def layer(x, _):
            return calls.output(x, key, value, return_residual=False), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), query, length=3)[0] ** 2)

    def sharded(*xs):
        return jax.lax.psum(layers(*xs), ("data", "model"))

    specs = tuple(BOTH[name] for name in ("query", "key", "value"))
    got = jax.grad(jax.shard_map(sharded, mesh=_mesh(), in_specs=specs, out_specs=P()), (0, 1, 2))
    _near(jax.jit(got)(query, key, value), jax.jit(jax.grad(layers, (0, 1, 2)))(query, key, value))


def test_vmap_inside_and_around_shard_map():
    """A row vmapped inside, the shards mapped around, one more axis outside."""
    args, want = _whole()
    inside = jax.vmap(calls.gradients)
    sharded = jax.shard_map(inside, mesh=_mesh(), in_specs=tuple(BATCH.values()), out_specs=_results(BATCH))
    twice = jax.vmap(sharded, out_axes=1)
    got = jax.jit(twice)(*(jnp.stack([x, x]) for x in args))
    _near([x[:, 0] for x in got], want)
    _near([x[:, 1] for x in got], want)


def test_eager_shard_map():
    args, want = _whole()
    mesh = _mesh()
    sharded = jax.shard_map(calls.gradients, mesh=mesh, in_specs=tuple(BATCH.values()), out_specs=_results(BATCH))
    placed = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in args]
    _near(sharded(*placed), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_over_one_axis_of_two(kind):
    """The heads stay split over the other axis, automatically or by type."""
    args, want = _whole()
    mesh = _mesh(kind)
    in_specs, out_specs = tuple(BATCH.values()), _results(BATCH)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, BOTH.values(), strict=True)]
        sharded = jax.shard_map(calls.gradients, in_specs=in_specs, out_specs=out_specs, axis_names={"data"})
        got = jax.jit(sharded)(*placed)
    _near(got, want)
    if kind == AxisType.Explicit:
        assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, BOTH["dout"]), got[0].ndim)


def test_pmap():
    """A device for each of eight rows; the keys and values of row 0 are shared by all."""
    args = [calls.random(4, name, (8, *calls.SHAPES[name]), jnp.float32) for name in calls.NAMES]
    args[1:3] = [x[0] for x in args[1:3]]
    in_axes = (0, None, None, 0, 0, 0, 0, 0)
    got = jax.pmap(calls.gradients, in_axes=in_axes, devices=jax.devices("cpu")[:8])(*args)
    _near(got, jax.jit(jax.vmap(calls.gradients, in_axes))(*args))


def test_gradient_of_a_pmap():
    args = [calls.random(5, name, (8, *calls.SHAPES[name]), jnp.float32) for name in ("query", "key", "value")]
    mapped = jax.pmap(
        lambda *xs: jnp.sum(calls.output(*xs)[0] ** 2), in_axes=(0, None, 0), devices=jax.devices("cpu")[:8]
    )
    vmapped = jax.vmap(lambda *xs: jnp.sum(calls.output(*xs)[0] ** 2), in_axes=(0, None, 0))
    args[1] = args[1][0]
    got, want = (jax.grad(lambda *xs, f=f: jnp.sum(f(*xs)), (0, 1, 2))(*args) for f in (mapped, vmapped))
    _near(got, want)


# Automatic sharding.


@pytest.mark.parametrize("split", [*SPLITS.values(), SHARED_KEYS], ids=[*SPLITS.keys(), "shared keys"])
def test_jit_of_split_arrays(split):
    args, want = _whole()
    mesh = _mesh()
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, split.values(), strict=True)]
    _near(jax.jit(calls.gradients)(*placed), want)


def test_jit_of_split_sequences():
    """Attention needs whole sequences; what is split is gathered."""
    args, want = _whole()
    mesh = _mesh()
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, None, None, "model"))) for x in args[2:3]]
    _near(jax.jit(calls.gradients)(*args[:2], *placed, *args[3:]), want)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_explicit_mesh(split):
    """Types say how results are split: as the operands. Each gradient has its operand's type."""
    args, want = _whole()
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, split.values(), strict=True)]
        got = jax.jit(calls.gradients)(*placed)
        _near(got, want)
        for name, x in zip(("dout", "dlse", "query", "key", "value", "scale"), got, strict=True):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, split[name]), x.ndim), name
            assert jax.typeof(x).sharding.spec == jax.typeof(placed[list(SHAPES).index(name)]).sharding.spec


def test_vmap_in_an_explicit_mesh():
    args, want = _whole()
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, BOTH.values(), strict=True)]
        _near(jax.jit(jax.vmap(calls.gradients))(*placed), want)


def test_vmap_over_heads_in_an_explicit_mesh():
    """K groups of heads, each a call with N / K query heads and one key head."""
    query, key, value = _operands(6)
    mesh = _mesh(AxisType.Explicit)
    want = calls.output(query, key, value)[0].reshape(B, calls.T, K, N // K, calls.DV)
    query = query.reshape(B, calls.T, K, N // K, calls.D)
    heads = jax.vmap(lambda *xs: calls.output(*xs, return_residual=False), 2, 2)
    for spec in (P(), P("data"), P(None, None, "model")):
        with jax.set_mesh(mesh):
            xs = [
                jax.device_put(x, NamedSharding(mesh, spec)) for x in (query, key[:, :, :, None], value[:, :, :, None])
            ]
            got = jax.jit(heads)(*xs)
        _near([got], [want])
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim)


def test_split_sequences_in_an_explicit_mesh_are_refused():
    query, key, value = _operands(7)
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        split = jax.device_put(query[:, :6], NamedSharding(mesh, P(None, "model")))
        with pytest.raises(NotImplementedError, match=r"split along T over 'model'.*reshard"):
            jax.jit(calls.output)(split, key, value)
