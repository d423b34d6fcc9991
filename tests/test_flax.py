"""attention_fn inside flax models, linen and nnx, against flax's own attention with the same weights.

In float32 on CPU, where both are accurate.
"""

import functools
import inspect

import calls
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from jax_flash2.flax import attention_fn

WIDTH, HEADS, LENGTH, BATCH = 24, 4, 11, 3
causal_fn = functools.partial(attention_fn, is_causal=True)


pytestmark = pytest.mark.usefixtures("on_cpu")


class Decoder(nn.Module):
    """Two layers of pre-norm self-attention and MLP, then cross-attention to `context`."""

    attention_fn: object
    masked: bool  # whether causality is said by a mask

    @nn.compact
    def __call__(self, x, context):
        mask = nn.make_causal_mask(x[..., 0]) if self.masked else None
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x += nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)(y, mask=mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        cross = nn.dot_product_attention if self.masked else attention_fn
        return x + nn.MultiHeadDotProductAttention(HEADS, attention_fn=cross)(x, context)


@pytest.mark.parametrize("batch", [(BATCH,), (2, BATCH)], ids=["one batch axis", "two"])
def test_linen_model(batch):
    x, context = calls.inputs(*batch, LENGTH, WIDTH), calls.inputs(*batch, 7, WIDTH) + 1
    theirs, ours = Decoder(nn.dot_product_attention, True), Decoder(causal_fn, False)
    params = theirs.init(jax.random.key(0), x, context)

    def loss(params, x, context, model):
        return jnp.sum(jnp.sin(model.apply(params, x, context)))

    calls.assert_close(ours.apply(params, x, context), theirs.apply(params, x, context), jnp.float32)
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, model=m), (0, 1, 2)))(params, x, context) for m in (ours, theirs)
    )
    calls.assert_close(got, want, jnp.float32)
    counts = calls.count(jax.grad(functools.partial(loss, model=ours)), params, x, context)
    assert (counts["flash_forward"], counts["flash_backward"]) == (3, 3)


class Block(nnx.Module):
    def __init__(self, attention_fn, **keywords):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=WIDTH, attention_fn=attention_fn, decode=False, rngs=rngs, **keywords
        )
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, **keywords):
        x = x + self.attend(self.norm(x), **keywords)
        return x + nnx.gelu(self.mlp(x))


def _nnx_results(model, x, **keywords):
    def loss(model, x):
        return jnp.sum(jnp.sin(model(x, **keywords)))

    return model(x, **keywords), *nnx.jit(nnx.grad(loss, argnums=(0, 1)))(model, x)


def test_nnx_model():
    """Causality by mask there, bound here: what every version of nnx understands."""
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    mask = nnx.make_causal_mask(x[..., 0])
    want = _nnx_results(Block(nnx.dot_product_attention), x, mask=mask)
    function = functools.partial(_ignoring_is_causal, causal_fn)
    calls.assert_close(_nnx_results(Block(function), x), want, jnp.float32)


def _ignoring_is_causal(function, *args, is_causal=None, **keywords):
    return function(*args, **keywords)


@pytest.mark.skipif(
    "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters,
    reason="this flax has no grouped heads",
)
def test_nnx_grouped_heads_and_is_causal():
    ours, theirs = (Block(function, num_kv_heads=2) for function in (attention_fn, nnx.dot_product_attention))
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    got, want = (_nnx_results(model, x, is_causal=True) for model in (ours, theirs))
    calls.assert_close(got, want, jnp.float32)


# Decoding: one query, a mask over the unused part of a cache.


def test_linen_decode():
    x = calls.inputs(BATCH, 5, WIDTH)
    outs = []
    for function in (nn.dot_product_attention, attention_fn):
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=function, decode=True)
        variables = layer.init(jax.random.key(0), x)
        params, cache = variables["params"], variables["cache"]
        steps = []
        for i in range(5):
            y, state = layer.apply({"params": params, "cache": cache}, x[:, i : i + 1], mutable=["cache"])
            cache = state["cache"]
            steps.append(y)
        outs.append(jnp.concatenate(steps, 1))
    calls.assert_close(outs[1], outs[0], jnp.float32)
    whole = nn.MultiHeadDotProductAttention(HEADS, attention_fn=causal_fn).apply({"params": params}, x)
    calls.assert_close(outs[1], whole, jnp.float32)


def test_nnx_decode():
    x = calls.inputs(BATCH, 5, WIDTH)
    outs = []
    for function in (nnx.dot_product_attention, attention_fn):
        layer = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=WIDTH, attention_fn=function, decode=True, rngs=nnx.Rngs(0)
        )
        layer.init_cache(x.shape)
        outs.append(jnp.concatenate([layer(x[:, i : i + 1]) for i in range(5)], 1))
    calls.assert_close(outs[1], outs[0], jnp.float32)


# What is refused, or met.


def test_dtype_is_what_the_layer_says():
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    layers = [
        nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16, attention_fn=f)
        for f in (nn.dot_product_attention, attention_fn)
    ]
    params = layers[0].init(jax.random.key(0), x)
    want, got = (layer.apply(params, x) for layer in layers)
    assert got.dtype == want.dtype == jnp.bfloat16
    calls.assert_close(got, want, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        mixed = attention_fn(*(x.astype(d)[:, :, None] for d in ("bfloat16", "float32", "bfloat16")))
    assert mixed.dtype == jnp.float32


def test_a_mask():
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    mask = nn.make_causal_mask(x[..., 0])
    layers = [nn.MultiHeadDotProductAttention(HEADS, attention_fn=f) for f in (nn.dot_product_attention, attention_fn)]
    params = layers[0].init(jax.random.key(0), x)
    want, got = (layer.apply(params, x, mask=mask) for layer in layers)
    calls.assert_close(got, want, jnp.float32)


def test_dropout():
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    layer = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.5, attention_fn=attention_fn)
    params = layer.init(jax.random.key(0), x, deterministic=True)
    plain = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    calls.assert_close(layer.apply(params, x, deterministic=True), plain.apply(params, x), jnp.float32)
    dropped = layer.apply(params, x, deterministic=False, rngs={"dropout": jax.random.key(1)})
    assert float(jnp.abs(dropped - plain.apply(params, x)).max()) > 0.01


def test_dropout_that_is_one_choice_for_all():
    """broadcast_dropout: every batch row and head drops the same elements."""
    q, k, v = jnp.zeros((2, 9, 4, 8)), jnp.zeros((2, 30, 4, 8)), jnp.ones((2, 30, 4, 8))
    for shared in (True, False):
        options = {"dropout_rng": jax.random.key(1), "dropout_rate": 0.5, "broadcast_dropout": shared}
        kept = attention_fn(q, k, v, **options)[..., 0]
        assert bool((kept == kept[:1, :, :1]).all()) == shared
        calls.assert_close(kept, attention_fn(q, k, v, **options, implementation="reference")[..., 0], jnp.float32)


def test_weights_cannot_be_sown():
    x = calls.inputs(BATCH, LENGTH, WIDTH)
    layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    with pytest.raises(NotImplementedError, match=r"module is MultiHeadDotProductAttention.*sow_weights"):
        layer.init(jax.random.key(0), x, sow_weights=True)
