"""Wrong input is refused while tracing, in a message that names the argument, its value, the rule and the remedy.

What is right but not served is refused too, and the message says what is served. Nothing is dropped in silence.
"""

import functools
import importlib
import re
import runpy

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash2
from jax_flash2 import _native, attention, dot_product_attention, reference

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def shape(*sizes, dtype=f32):
    return jax.ShapeDtypeStruct(sizes, dtype)


Q, K, V = shape(2, 7, 4, 16), shape(2, 9, 2, 16), shape(2, 9, 2, 24)
QKV = {"query": Q, "key": K, "value": V}
CAUSAL = {"is_causal": True, "causal_alignment": "top_left"}

# Arguments beside (Q, K, V), the exception, and words that its message must hold. Arrays are given as shapes: nothing
# has a value while tracing.
WRONG = {
    "rank of query": ({"query": shape(7, 16)}, ValueError, ["query", "(7, 16)", "[..., T, N, D]"]),
    "rank of key": ({"key": shape(9, 16)}, ValueError, ["key", "(9, 16)", "[..., S, K, D]"]),
    "different ranks": ({"query": shape(7, 4, 16)}, ValueError, ["batch axes", "(7, 4, 16)", "(2, 9, 2, 16)"]),
    "batch": ({"query": shape(3, 7, 4, 16)}, ValueError, ["batch axes", "(3, 7, 4, 16)", "broadcast_to"]),
    "batch of one": ({"query": shape(1, 7, 4, 16)}, ValueError, ["batch axes", "(1, 7, 4, 16)"]),
    "head dim": ({"key": shape(2, 9, 2, 8)}, ValueError, ["head dim D", "16", "8", "query", "key"]),
    "key length": ({"value": shape(2, 8, 2, 24)}, ValueError, ["key and value", "length S", "(9, 2)", "(8, 2)"]),
    "key heads": ({"value": shape(2, 9, 4, 24)}, ValueError, ["key and value", "heads K", "(9, 2)", "(9, 4)"]),
    "groups": ({"query": shape(2, 7, 5, 16)}, ValueError, ["query heads", "multiple", "N = 5", "K = 2"]),
    "more key heads": (
        {"key": shape(2, 9, 8, 16), "value": shape(2, 9, 8, 24)}, ValueError, ["multiple", "N = 4", "K = 8"],
    ),
    "no query heads": ({"query": shape(2, 7, 0, 16)}, ValueError, ["query heads N", "0"]),
    "no key heads": ({"key": shape(2, 9, 0, 16), "value": shape(2, 9, 0, 24)}, ValueError, ["key/value heads K", "0"]),
    "no head dim": ({"query": shape(2, 7, 4, 0), "key": shape(2, 9, 2, 0)}, ValueError, ["head dim D", "0"]),
    "no value head dim": ({"value": shape(2, 9, 2, 0)}, ValueError, ["value head dim Dv", "0"]),
    "large head dim": (
        {"query": shape(2, 7, 4, 264), "key": shape(2, 9, 2, 264)}, ValueError, ["head dim D", "264", "256"],
    ),
    "large value head dim": ({"value": shape(2, 9, 2, 257)}, ValueError, ["value head dim Dv", "257", "256"]),
    "long": ({"query": shape(1, 2**29, 4, 16), "key": shape(1, 9, 2, 16), "value": shape(1, 9, 2, 24)},
             ValueError, ["query length T", str(2**29)]),
    "mixed dtypes": (
        {"key": shape(2, 9, 2, 16, dtype=bf16)}, ValueError, ["dtype", "query is float32", "key is bfloat16"],
    ),
    "integers": ({"query": shape(2, 7, 4, 16, dtype=i32)}, TypeError, ["query", "int32", "bfloat16", ".astype"]),
    "float8": ({"value": shape(2, 9, 2, 24, dtype=jnp.float8_e4m3fn)}, TypeError, ["value", "float8_e4m3fn"]),
    "a list": ({"query": [[[1.0]]]}, TypeError, ["query", "list", "jax.numpy.asarray"]),
    "a name": ({"key": "key"}, TypeError, ["key", "str"]),
    # Masks.
    "no alignment": ({"is_causal": True}, ValueError, ["causal_alignment", "T = 7", "S = 9", "top_left"]),
    "no alignment of a window": ({"local_window_size": (3, None)}, ValueError, ["causal_alignment", "top_left"]),
    "no alignment with lengths": (
        {"query": shape(2, 9, 4, 16), "is_causal": True, "key_value_seq_lengths": shape(2, dtype=i32)},
        ValueError, ["causal_alignment", "lengths", "bottom_right"],
    ),
    "no alignment of ALiBi": ({"alibi_slopes": shape(4)}, ValueError, ["causal_alignment", "ALiBi"]),
    "alignment": (CAUSAL | {"causal_alignment": "center"}, ValueError, ["causal_alignment", "'center'", "'top_left'"]),
    "alignment where none is needed": ({"causal_alignment": "left"}, ValueError, ["causal_alignment", "'left'"]),
    "causal array": ({"is_causal": shape(dtype=jnp.bool_)}, TypeError, ["is_causal", "bool"]),
    "causal number": ({"is_causal": 1}, TypeError, ["is_causal", "1", "bool"]),
    "negative window": ({"local_window_size": (3, -1), **CAUSAL}, ValueError, ["local_window_size", "(3, -1)", "None"]),
    "negative int window": ({"local_window_size": -2, **CAUSAL}, ValueError, ["local_window_size", "-2"]),
    "float window": ({"local_window_size": 2.0, **CAUSAL}, TypeError, ["local_window_size", "2.0", "(left, right)"]),
    "bool window": ({"local_window_size": True, **CAUSAL}, TypeError, ["local_window_size", "True"]),
    "long window": ({"local_window_size": (1, 2, 3), **CAUSAL}, TypeError, ["local_window_size", "(1, 2, 3)"]),
    "array window": ({"local_window_size": shape(dtype=i32)}, TypeError, ["local_window_size"]),
    "query lengths": ({"query_seq_lengths": shape(3, dtype=i32)}, ValueError, ["query_seq_lengths", "(3,)", "(2,)"]),
    "rank of lengths": (
        {"key_value_seq_lengths": shape(2, 1, dtype=i32)}, ValueError, ["key_value_seq_lengths", "(2, 1)", "(2,)"],
    ),
    "float lengths": ({"key_value_seq_lengths": shape(2)}, TypeError, ["key_value_seq_lengths", "float32", "integer"]),
    "bool lengths": ({"query_seq_lengths": shape(2, dtype=jnp.bool_)}, TypeError, ["query_seq_lengths", "bool"]),
    "a list of lengths": ({"query_seq_lengths": [1, 2]}, TypeError, ["query_seq_lengths", "list", "asarray"]),
    "mask dtype": ({"mask": shape(2, 4, 7, 9)}, TypeError, ["mask", "float32", "bool", "bias"]),
    "mask rank": ({"mask": shape(2, 7, 9, dtype=jnp.bool_)}, ValueError, ["mask", "(2, 7, 9)", "(2, 4, 7, 9)"]),
    "mask shape": ({"mask": shape(2, 4, 9, 7, dtype=jnp.bool_)}, ValueError, ["mask", "(2, 4, 9, 7)", "(2, 4, 7, 9)"]),
    "bias dtype": ({"bias": shape(2, 4, 7, 9, dtype=jnp.bool_)}, TypeError, ["bias", "bool", "floating"]),
    "bias of key heads": ({"bias": shape(2, 2, 7, 9)}, ValueError, ["bias", "(2, 2, 7, 9)", "(2, 4, 7, 9)"]),
    "segments of one side": (
        {"query_segment_ids": shape(2, 7, dtype=i32)}, ValueError, ["key_value_segment_ids", "None", "both"],
    ),
    "segment ids": (
        {"query_segment_ids": shape(2, 7, dtype=i32), "key_value_segment_ids": shape(2, 7, dtype=i32)},
        ValueError, ["key_value_segment_ids", "(2, 7)", "(2, 9)"],
    ),
    "float segments": (
        {"query_segment_ids": shape(2, 7), "key_value_segment_ids": shape(2, 9)},
        TypeError, ["query_segment_ids", "float32"],
    ),
    # Scores.
    "infinite scale": ({"scale": float("inf")}, ValueError, ["scale", "inf", "finite"]),
    "NaN scale": ({"scale": np.float32("nan")}, ValueError, ["scale", "nan", "finite"]),
    "scale dtype": ({"scale": shape(dtype=i32)}, TypeError, ["scale", "int32", "floating"]),
    "scale shape": ({"scale": shape(4)}, ValueError, ["scale", "(4,)", "(2,)"]),
    "scale name": ({"scale": "auto"}, TypeError, ["scale", "'auto'", "float"]),
    "zero soft cap": ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap", "0.0", "positive", "None"]),
    "negative soft cap": ({"logits_soft_cap": -3}, ValueError, ["logits_soft_cap", "-3.0"]),
    "infinite soft cap": ({"logits_soft_cap": float("inf")}, ValueError, ["logits_soft_cap", "inf"]),
    "NaN soft cap": ({"logits_soft_cap": float("nan")}, ValueError, ["logits_soft_cap", "nan"]),
    "soft cap too small for float32": ({"logits_soft_cap": 1e-40}, ValueError, ["logits_soft_cap", "1e-40", "1e-30"]),
    "soft cap too large for float32": ({"logits_soft_cap": 10**400}, ValueError, ["logits_soft_cap", "inf", "1e+30"]),
    "scale too large for float32": ({"scale": 1e39}, ValueError, ["scale", "1e+39", "1e+30"]),
    "scale of another kind": ({"scale": 1j}, TypeError, ["scale", "1j", "float()"]),
    "alignments": ({**CAUSAL, "causal_alignment": np.array(["a", "b"])}, ValueError, ["causal_alignment", "top_left"]),
    "objects": ({"query": np.array([[[None]]])}, TypeError, ["query", "object", "numbers"]),
    "traced soft cap": ({"logits_soft_cap": shape()}, TypeError, ["logits_soft_cap", "Python float"]),
    "slopes": ({"alibi_slopes": shape(2), **CAUSAL}, ValueError, ["alibi_slopes", "(2,)", "(2, 4)"]),
    "integer slopes": ({"alibi_slopes": shape(4, dtype=i32), **CAUSAL}, TypeError, ["alibi_slopes", "int32"]),
    "sinks": ({"sinks": shape(2, 2)}, ValueError, ["sinks", "(2, 2)", "(2, 4)"]),
    # The rest.
    "dropout of everything": ({"dropout_rate": 1.0}, ValueError, ["dropout_rate", "1.0", "[0, 1)"]),
    "negative dropout": ({"dropout_rate": -0.1}, ValueError, ["dropout_rate", "-0.1", "[0, 1)"]),
    "NaN dropout": ({"dropout_rate": float("nan")}, ValueError, ["dropout_rate", "nan", "[0, 1)"]),
    "traced dropout": ({"dropout_rate": shape()}, TypeError, ["dropout_rate", "Python float"]),
    "dropout without a key": ({"dropout_rate": 0.5}, ValueError, ["dropout_rng", "0.5", "jax.random key"]),
    "two keys": (
        {"dropout_rate": 0.5, "dropout_rng": shape(2, 2, dtype=jnp.uint32)}, TypeError, ["dropout_rng", "[2, 2]"],
    ),
    "a seed": ({"dropout_rate": 0.5, "dropout_rng": 42}, TypeError, ["dropout_rng", "42", "jax.random.key(seed)"]),
    "deterministic": ({"deterministic": None}, TypeError, ["deterministic", "None", "bool"]),
    "return_residual": ({"return_residual": "lse"}, TypeError, ["return_residual", "'lse'", "bool"]),
}  # fmt: skip


def trace(call, arguments):
    return calls.trace(call, QKV | arguments)


@pytest.mark.parametrize(("arguments", "exception", "words"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input(arguments, exception, words):
    for call in (attention, reference.attention):
        calls.assert_refused(call, QKV | arguments, exception, words)


def test_the_rows_are_wrong_by_one_argument_only():
    """What every row adds its fault to is right."""
    out, lse = trace(attention, CAUSAL | {"return_residual": True})
    assert (out.shape, out.dtype) == ((2, 7, 4, 24), f32)
    assert (lse.shape, lse.dtype) == ((2, 7, 4), f32)


def test_key_without_a_batch_says_so_even_when_sizes_agree():
    with pytest.raises(ValueError, match="batch axes"):
        trace(attention, {"key": shape(9, 2, 16), "value": shape(9, 2, 24)})


@pytest.mark.parametrize("name", ["gpu", "xla", "cudnn", "CPU", 1, "", np.array(["cpu"])])
def test_unknown_implementation(name):
    for call in (attention, dot_product_attention):
        with pytest.raises(ValueError, match="implementation") as error:
            trace(call, {"implementation": name})
        assert all(word in str(error.value) for word in (repr(name), "'cuda'", "'cpu'", "'reference'", "backend"))


OPERANDS = {
    "bias": {"bias": shape(1, 1, 7, 9)},
    "mask": {"mask": shape(2, 4, 7, 9, dtype=jnp.bool_)},
    "alibi_slopes": {"alibi_slopes": shape(4), "causal_alignment": "top_left"},
    "sinks": {"sinks": shape(4)},
    "segment ids": {"query_segment_ids": shape(2, 7, dtype=i32), "key_value_segment_ids": shape(2, 9, dtype=i32)},
    "dropout": {"dropout_rate": 0.5, "dropout_rng": shape(2, dtype=jnp.uint32)},
}


def _gradient_for(platform, *names, dtype=bf16, fixed=(), **keywords):
    """Lowers the gradient of a call with these operands, in all of them but the `fixed`."""
    arguments = {k: x.update(dtype=dtype) for k, x in QKV.items()}
    for name in names:
        arguments |= OPERANDS[name]
    shapes = {k: x for k, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    rest = {k: x for k, x in arguments.items() if k not in shapes} | keywords
    wanted = {k: x for k, x in shapes.items() if jnp.issubdtype(x.dtype, jnp.floating) and k not in fixed}
    others = {k: x for k, x in shapes.items() if k not in wanted}

    def loss(wanted, others):
        return jnp.sum(attention(**wanted, **others, **rest).astype(f32))

    return jax.jit(jax.grad(loss)).trace(wanted, others).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", [bf16, f32, jnp.float64])
@pytest.mark.parametrize("name", OPERANDS)
def test_operands_compile_for_cuda(name, dtype):
    """Where they may remove pairs, q, k, v and dout are cleared of what may hold NaN first."""
    with jax.enable_x64(dtype == jnp.float64):
        text = _gradient_for("cuda", name, dtype=dtype)
    assert len(re.findall("custom_call @jax_flash2_(forward|backward)_v1", text)) == 2
    assert ("stablehlo.select" in text) == (name in ("bias", "mask", "segment ids"))


@pytest.mark.parametrize(("name", "words"), [("bias", "a shared bias"), ("alibi_slopes", "alibi_slopes")])
def test_what_cuda_cannot_do_deterministically_is_refused_by_name(name, words):
    _gradient_for("cpu", name, deterministic=True)
    with pytest.raises(NotImplementedError, match=rf"deterministic=True on CUDA.*{words}.*deterministic=False"):
        _gradient_for("cuda", name, deterministic=True)
    _gradient_for("cuda", "mask", "sinks", "dropout", deterministic=True)


def test_constants_have_no_gradient_that_could_be_out_of_order():
    names = ("bias", "alibi_slopes")
    _gradient_for("cuda", *names, fixed=names, deterministic=True)
    with pytest.raises(NotImplementedError, match="the gradient of a shared bias:"):
        _gradient_for("cuda", *names, fixed=("alibi_slopes",), deterministic=True)


@pytest.mark.parametrize("dtype", [f32, jnp.float64])
def test_the_kernels_by_fmas_sum_slopes_in_order(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        _gradient_for("cuda", "alibi_slopes", dtype=dtype, deterministic=True)
        with pytest.raises(NotImplementedError, match="the gradient of a shared bias:"):
            _gradient_for("cuda", "alibi_slopes", "bias", dtype=dtype, deterministic=True)


@pytest.mark.parametrize("implementation", [None, "cpu", "reference"])
@pytest.mark.parametrize("name", OPERANDS)
def test_operands_are_taken(name, implementation):
    assert trace(attention, OPERANDS[name] | {"implementation": implementation}).shape == (2, 7, 4, 24)


def test_a_key_without_a_rate_is_not_dropout():
    trace(attention, {"dropout_rng": shape(2, dtype=jnp.uint32)})


def test_cuda_on_a_cpu_is_refused_and_names_both():
    q, k, v = (jnp.zeros(x.shape, bf16) for x in (Q, K, V))
    on_cpu = jax.devices("cpu")[0]
    with jax.default_device(on_cpu), pytest.raises(NotImplementedError, match=r"'cuda' was asked for.*'cpu'"):
        attention(*jax.device_put((q, k, v), on_cpu), implementation="cuda")


def test_numbers_of_other_kinds_are_taken():
    trace(attention, {"scale": np.float16(0.5), "logits_soft_cap": np.int64(30), "is_causal": np.True_,
                      "causal_alignment": "top_left", "local_window_size": [np.int32(4), None]})  # fmt: skip


@pytest.mark.parametrize(("error", "caught"), [(ModuleNotFoundError, True), (ImportError, True), (TypeError, False)])
def test_only_an_import_that_fails_counts_as_no_cuda_code(monkeypatch, error, caught):
    """A fault of our own must not look like an install for the CPU; and what is caught is said."""
    real = importlib.import_module

    def without_cuda(name, *rest):
        if name == "jax_flash2._cuda":
            raise error("libcudart is missing")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without_cuda)
    run = functools.partial(runpy.run_path, _native.__file__)
    if not caught:
        with pytest.raises(error, match="libcudart"):
            run()
        return
    found = run()
    assert found["cuda"] is None
    assert found["cuda_missing"] in ("was built without CUDA code", "cannot load its CUDA code (libcudart is missing)")


def test_capabilities_are_plain_data():
    import json

    said = jax_flash2.capabilities()
    assert json.loads(json.dumps(said)).keys() == said.keys()
    assert said["jax_flash2"] == jax_flash2.__version__
    assert len(said["cpu"]["source_digest"]) == 64
    assert (said["cuda"] is None) == ("cuda" not in said["platforms"]) == (said["cuda_missing"] is not None)
    if said["cuda"] is not None:
        assert said["cuda"]["dtypes"] == ["bfloat16", "float16", "float32", "float64"]
        assert 256 in said["cuda"]["head_dims"]
