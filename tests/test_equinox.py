"""MultiheadAttention inside equinox models against equinox's own, with the same weights: equal outputs and gradients.

In float32 on CPU, where both are accurate.
"""

import importlib
import sys

import calls
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from jax_flash2.equinox import MultiheadAttention, from_equinox

WIDTH, HEADS, LENGTH, BATCH = 24, 4, 11, 3


pytestmark = pytest.mark.usefixtures("on_cpu")


class Block(eqx.Module):
    attend: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, layer, key, **keywords):
        self.attend = layer(HEADS, WIDTH, key=key, **keywords)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)

    def __call__(self, x, context, **keywords):
        x = x + self.attend(jax.vmap(self.norm)(x), context, context, **keywords)
        return x + jax.vmap(self.mlp)(x)


class Model(eqx.Module):
    blocks: list

    def __init__(self, layer, **keywords):
        self.blocks = [Block(layer, key, **keywords) for key in jax.random.split(jax.random.key(0), 2)]

    def __call__(self, x, context=None, **keywords):
        for block in self.blocks:
            x = block(x, x if context is None else context, **keywords)
        return x


def _results(model, *inputs, **keywords):
    """Over a batch, which the user maps outside: the output and the gradient of every weight and input."""

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(everything):
        model, inputs = everything
        return jnp.sum(jnp.sin(jax.vmap(lambda *xs: model(*xs, **keywords))(*inputs)))

    return jax.vmap(lambda *xs: model(*xs, **keywords))(*inputs), gradient((model, inputs))


def _leaves(x):
    return jax.tree.leaves(eqx.filter(x, eqx.is_array))


ALL = {"use_query_bias": True, "use_key_bias": True, "use_value_bias": True, "use_output_bias": True}


@pytest.mark.parametrize("keywords", [{}, ALL | {"qk_size": 5, "vo_size": 9}], ids=["usual", "biases, other sizes"])
def test_model(keywords):
    ours, theirs = Model(MultiheadAttention, **keywords), Model(eqx.nn.MultiheadAttention, **keywords)
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    calls.assert_close(_leaves(ours), _leaves(theirs), jnp.float32)
    calls.assert_close(_leaves(_results(ours, x)), _leaves(_results(theirs, x)), jnp.float32)


def test_causal_model():
    """Causality by mask there, by keyword here."""
    ours, theirs = Model(MultiheadAttention), Model(eqx.nn.MultiheadAttention)
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    want = _results(theirs, x, mask=jnp.tri(LENGTH, dtype=bool))
    calls.assert_close(_leaves(_results(ours, x, is_causal=True)), _leaves(want), jnp.float32)


def test_cross_attention_to_a_padded_context():
    ours, theirs = Model(MultiheadAttention), Model(eqx.nn.MultiheadAttention)
    x, context = calls.inputs(BATCH, LENGTH, WIDTH), calls.inputs(BATCH, 7, WIDTH) + 1
    want = _results(theirs, x, context, mask=jnp.broadcast_to(jnp.arange(7) < 5, (LENGTH, 7)))
    got = _results(ours, x, context, key_value_seq_length=5)
    calls.assert_close(_leaves(got), _leaves(want), jnp.float32)


def test_replacing_it_in_a_model():
    """Same structure of weights: checkpoints and optimiser states of one are those of the other."""
    theirs = Model(eqx.nn.MultiheadAttention, **ALL)
    ours = from_equinox(theirs)
    assert type(ours.blocks[1].attend) is MultiheadAttention
    for a, b in zip(_leaves(ours), _leaves(theirs), strict=True):
        assert a is b
    made = Model(MultiheadAttention, **ALL)
    assert jax.tree.structure(eqx.filter(ours, eqx.is_array)) == jax.tree.structure(eqx.filter(made, eqx.is_array))
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    calls.assert_close(_leaves(_results(ours, x)), _leaves(_results(theirs, x)), jnp.float32)
    assert type(from_equinox(ours).blocks[0].attend) is MultiheadAttention


def test_one_kernel_call_for_the_batch():
    model, x = Model(MultiheadAttention), calls.inputs(BATCH, LENGTH, WIDTH)
    found = [e for e in calls.equations(jax.make_jaxpr(jax.vmap(model))(x)) if str(e.primitive) == "flash_forward"]
    assert [e.invars[0].aval.shape for e in found] == [(BATCH, LENGTH, HEADS, WIDTH // HEADS)] * 2


def test_rotary_embeddings():
    rotary = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS)

    def process(q, k, v):
        return *(jax.vmap(rotary, in_axes=1, out_axes=1)(x) for x in (q, k)), v

    x = calls.inputs(BATCH, LENGTH, WIDTH)
    ours, theirs = Model(MultiheadAttention), Model(eqx.nn.MultiheadAttention)
    got, want = (_results(model, x, process_heads=process) for model in (ours, theirs))
    calls.assert_close(_leaves(got), _leaves(want), jnp.float32)
    with pytest.raises(ValueError, match="process_heads returned"):
        ours(x[0], process_heads=lambda q, k, v: (q[:-1], k, v))


@pytest.mark.parametrize("heads", [(), (HEADS,)], ids=["for all heads", "by head"])
def test_a_mask(heads):
    ours, theirs = (Model(layer) for layer in (MultiheadAttention, eqx.nn.MultiheadAttention))
    x = calls.inputs(LENGTH, WIDTH)
    mask = (calls.inputs(*heads, LENGTH, LENGTH) > 0).at[..., 0].set(True)
    calls.assert_close(ours(x, mask=mask), theirs(x, mask=mask), jnp.float32)


def test_dropout():
    model = MultiheadAttention(HEADS, WIDTH, dropout_p=0.5, key=jax.random.key(0))
    x = calls.inputs(LENGTH, WIDTH)
    want = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))(x, x, x)
    calls.assert_close(model(x, x, x, inference=True), want, jnp.float32)
    calls.assert_close(eqx.nn.inference_mode(model)(x, x, x), want, jnp.float32)
    with pytest.warns(UserWarning, match="deprecated"):
        calls.assert_close(model(x, x, x, deterministic=True), want, jnp.float32)
    with pytest.raises(RuntimeError, match="requires a key"):
        model(x, x, x)
    got, want = (model(x, x, x, key=jax.random.key(1), implementation=i) for i in (None, "reference"))
    calls.assert_close(got, want, jnp.float32)
    assert float(jnp.abs(got - model(x, x, x, inference=True)).max()) > 0.01


def test_lengths_of_key_and_value():
    model = MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))
    x = calls.inputs(LENGTH, WIDTH)
    with pytest.raises(ValueError, match=r"key_ has shape \(11, 24\) and value \(10, 24\)"):
        model(x, x, x[1:])


def test_without_equinox(monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", None)
    monkeypatch.delitem(sys.modules, "jax_flash2.equinox")
    with pytest.raises(ImportError, match=r"jax_flash2.equinox needs equinox.*pip install equinox"):
        importlib.import_module("jax_flash2.equinox")
