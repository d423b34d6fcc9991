"""One fact, two languages: the Python mirror equals the native lists. And what each keyword becomes on the way."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import _api, _cpu, attention, varlen_attention
from jax_flash2._spec import EXTRAS, MAX_LENGTH, AttentionSpec, Extras


def test_fields_are_those_of_the_native_list_in_order():
    mirror = [(field.name, type(field.default).__name__, field.default) for field in dataclasses.fields(AttentionSpec)]
    assert mirror == _cpu.spec_fields()


def test_operands_are_those_of_the_native_list_in_order():
    assert [(name, *x) for name, x in EXTRAS._asdict().items()] == _cpu.extras()
    assert Extras._field_defaults == dict.fromkeys(Extras._fields)


def test_no_length_passes_where_the_native_one_refuses():
    assert _cpu.max_length() == MAX_LENGTH


T, S = 7, 9


@pytest.fixture
def kernel_call(monkeypatch):
    """Calls attention, or what it is given, and returns what reaches the kernels: (spec, extras)."""
    seen = []

    def flash_attention(query, key, value, extras, spec, **options):
        seen.append((spec, extras))
        return jnp.zeros_like(query)

    monkeypatch.setattr(_api, "flash_attention", flash_attention)

    def call(run=None, *, T=T, S=S, batch=(2,), **keywords):
        q, k = jnp.zeros((*batch, T, 4, 16)), jnp.zeros((*batch, S, 2, 16))
        run() if run else attention(q, k, k, **keywords)
        return seen[-1]

    return call


BR, TL = {"causal_alignment": "bottom_right"}, {"causal_alignment": "top_left"}


@pytest.mark.parametrize(
    ("keywords", "fields"),
    [
        ({}, {}),
        ({"scale": 2}, {"scale": 2.0}),
        ({"scale": np.float64(-0.5)}, {"scale": -0.5}),
        ({"scale": np.array(0.5)}, {"scale": 0.5}),
        ({"logits_soft_cap": 30}, {"softcap": 30.0}),
        ({"deterministic": True}, {"deterministic": True}),
        ({"is_causal": True, **TL}, {"window_right": 0}),
        ({"is_causal": True, **BR}, {"window_right": 0, "bottom_right": True}),
        ({"local_window_size": 3, **TL}, {"window_left": 3, "window_right": 3}),
        ({"local_window_size": (np.int64(0), None), **BR}, {"window_left": 0, "bottom_right": True}),
        ({"local_window_size": [None, 2], **TL}, {"window_right": 2}),
        ({"local_window_size": (4, 2), "is_causal": True, **TL}, {"window_left": 4, "window_right": 0}),
        ({"local_window_size": (16, 0), **TL}, {"window_left": 16, "window_right": 0}),  # needs no is_causal
        ({"local_window_size": (2**70, 2**29), **TL}, {}),
        # Where the alignment cannot matter one program is enough.
        (BR, {}),
        ({"local_window_size": (None, None), **BR}, {}),
        ({"is_causal": True, "T": 9, **BR}, {"window_right": 0}),
        ({"is_causal": True, "T": 9}, {"window_right": 0}),
    ],
    ids=str,
)
def test_keywords_become_fields(kernel_call, keywords, fields):
    spec, extras = kernel_call(**keywords)
    assert spec == dataclasses.replace(AttentionSpec(scale=0.25), **fields)
    assert extras == Extras()


def test_a_static_bound_of_packed_sequences_is_a_hint(kernel_call):
    x, starts = jnp.zeros((40, 2, 16)), jnp.asarray([0, 20, 40])

    def longest(bound):
        return kernel_call(lambda: varlen_attention(x, x, x, starts, starts, max_seqlen_q=40, max_seqlen_k=bound))[0]

    assert [longest(bound).longest_span for bound in (1, 256, np.int32(300), 301)] == [256, 256, 512, 512]
    assert longest(2**40).longest_span == MAX_LENGTH
    assert longest(jnp.int32(7)).longest_span == -1  # it may be traced


def test_lengths_make_the_alignment_matter(kernel_call):
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        spec, _ = kernel_call(T=9, is_causal=True, **BR, **{name: jnp.asarray([9, 4])})
        assert spec.bottom_right


def test_an_array_scale_is_an_operand(kernel_call):
    for scale, shape in ((jnp.float32(0.5), (1,)), (np.array([0.5, 0.25]), (2,)), (jnp.ones(1, jnp.bfloat16), (1,))):
        spec, extras = kernel_call(scale=scale)
        assert spec == AttentionSpec()  # neutral, so that one program serves every value
        assert (extras.scale.dtype, extras.scale.shape) == (jnp.float32, shape)
    _, extras = kernel_call(batch=(2, 3), scale=jnp.ones((1, 3)))
    assert extras.scale.shape == (1, 3)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_lengths_of_any_integer_dtype_are_clamped_before_they_are_cast(kernel_call, dtype, array):
    if array is jnp.asarray and dtype.endswith("64"):
        with jax.enable_x64(True):
            _check_lengths(kernel_call, dtype, array)
    else:
        _check_lengths(kernel_call, dtype, array)


def _check_lengths(kernel_call, dtype, array):
    info = np.iinfo(dtype)
    values = [0, 5, info.max, max(info.min, -1), info.min, min(info.max, 2**32 + 3)]
    for T in (7, 300):  # 300 does not fit into 8 bits
        lengths = array(np.array(values, dtype))
        _, extras = kernel_call(batch=(6,), T=T, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
        assert extras.query_lens.dtype == extras.key_lens.dtype == jnp.int32
        np.testing.assert_array_equal(extras.query_lens, [min(max(x, 0), T) for x in values])
        np.testing.assert_array_equal(extras.key_lens, [min(max(x, 0), S) for x in values])


def test_one_length_for_all(kernel_call):
    for length in (3, np.int64(3), jnp.int32(3)):
        _, extras = kernel_call(batch=(2, 3), key_value_seq_lengths=length)
        np.testing.assert_array_equal(extras.key_lens, [[3]])
