"""The spans that the CUDA kernels are given for masks and ids, against numpy's brute force; no GPU is needed.

Who reads whom is compared pair by pair, and the rules of src/core/spec.h one by one. That a call with spans gives the
same answer as one without is seen on the CPU, whose kernels take them too.
"""

import functools
import itertools
import re

import cases
import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_flash2
from jax_flash2 import _ffi, _spans, attention
from jax_flash2._spec import AttentionSpec

pytestmark = pytest.mark.usefixtures("on_cpu")


def _spans_of(T, S, spec, heads=2, batch=(), **operands):
    xs = {
        "q": np.zeros((*batch, T, heads, 8)),
        "k": np.zeros((*batch, S, heads, 8)),
        "v": np.zeros((*batch, S, heads, 8)),
    }
    run = _compiled((*xs, *operands), spec)
    return {name: np.asarray(x) for name, x in run(*xs.values(), *operands.values()).items()}


@functools.cache
def _compiled(names, spec):
    options = {"xla_backend_optimization_level": 0}  # half the time to compile
    return jax.jit(lambda *xs: _spans.of(names, xs, spec), compiler_options=options)


def _bounds(T, S, spec, query_lens, key_lens):
    """bool [*#B, T, S]: what lengths and windows leave."""
    i, j = np.arange(T)[:, None], np.arange(S)
    t = np.clip(T if query_lens is None else query_lens, 0, T)
    s = np.clip(S if key_lens is None else key_lens, 0, S)
    t, s = np.asarray(t)[..., None, None], np.asarray(s)[..., None, None]
    at = i + (s - t if spec.bottom_right else 0)
    left = spec.window_left if spec.window_left >= 0 else T + S
    right = spec.window_right if spec.window_right >= 0 else T + S
    return (i < t) & (j < s) & (j >= at - left) & (j <= at + right)


def _removed(mask, query_ids, key_ids):
    """bool [*#B, #N, #T, #S]: what mask and ids leave."""
    keep = np.ones((1, 1, 1), bool) if mask is None else mask
    if query_ids is not None:
        key_ids = query_ids if key_ids is None else key_ids
        a, b = query_ids[..., None, :, None], key_ids[..., None, None, :]
        keep = keep & (a == b) & (a >= 0)
    return keep


def _check(got, T, S, spec, query_lens=None, key_lens=None, mask=None, query_ids=None, key_ids=None):
    """Every rule, for every batch row. Returns whether the spans are exact."""
    bounds = _bounds(T, S, spec, query_lens, key_lens)[..., None, :, :]
    left = _removed(mask, query_ids, key_ids)
    kept = np.any(bounds & left, -3)
    key_spans, query_spans, exact = (got[name] for name in ("key_spans", "query_spans", "span_flags"))
    nobody_dead, exact = exact >= 2, exact % 2
    batch = np.broadcast_shapes(kept.shape[:-2], exact.shape)
    assert key_spans.shape == (*exact.shape, T, 2)
    assert query_spans.shape == (*exact.shape, S, 2)
    assert all(x.dtype == np.int32 for x in got.values())
    bounds = np.broadcast_to(bounds, (*batch, 1, T, S))
    left = np.broadcast_to(left, (*batch, left.shape[-3], T, S))
    for at in np.ndindex(*batch):
        own = tuple(min(i, n - 1) for i, n in zip(at, exact.shape, strict=True))
        assert nobody_dead[own] == ((key_spans[own] >= 0).all() and (query_spans[own] >= 0).all())
        inside = {}
        for name, spans, alive, count in (
            ("keys", key_spans[own], kept[at].any(1), S),
            ("queries", query_spans[own], kept[at].any(0), T),
        ):
            begin, end = np.where(spans[:, 0] < 0, ~spans[:, 0], spans[:, 0]), spans[:, 1]
            assert (np.diff([begin, end], axis=1) >= 0).all(), name
            assert ((begin >= 0) & (begin <= count) & (end >= 0) & (end <= count)).all(), name
            np.testing.assert_array_equal((spans[:, 0] >= 0) & (spans[:, 0] < end), alive, name)
            inside[name] = alive[:, None] & (np.arange(count) >= begin[:, None]) & (np.arange(count) < end[:, None])
        seen = inside["keys"] & inside["queries"].T
        for n in range(left.shape[-3]):
            # What a kernel computes: in exact rows what the spans leave, in the others what mask and ids leave of it.
            np.testing.assert_array_equal(seen if exact[own] else seen & left[at][n], bounds[at][0] & left[at][n])
            if exact[own]:
                np.testing.assert_array_equal(inside["keys"], seen)
                np.testing.assert_array_equal(inside["queries"].T, seen)
            else:  # the two sides agree but on what is removed
                np.testing.assert_array_equal(inside["keys"] & left[at][n], inside["queries"].T & left[at][n])
    return exact


def _random_spec(rng):
    window = [int(rng.integers(0, 12)) if rng.random() < 0.4 else -1 for _ in range(2)]
    return AttentionSpec(
        window_left=window[0],
        window_right=0 if rng.random() < 0.3 else window[1],
        bottom_right=bool(rng.random() < 0.5),
    )


def _documents(rng, length, kind):
    """Ids of one batch row."""
    ids = np.sort(rng.integers(0, 5, length)) * int(rng.integers(1, 2**28))
    padded = int(rng.integers(0, length + 1)) if rng.random() < 0.4 else length
    if kind == "sorted":
        ids[padded:] = -1
    elif kind == "zeros behind":  # as where padding has id 0
        ids = ids + 1
        ids[padded:] = 0
    elif kind == "largest":
        ids = ids // max(ids.max(), 1) * (2**31 - 1)
        ids[padded:] = -1
    else:
        ids = rng.permutation(rng.integers(-1, 6, length))
    return ids.astype(np.int32)


KINDS = ("sorted", "zeros behind", "largest", "any")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_ids(rng, kind, lengths):
    exact, T, batch = [], 13, (3, 2)
    for same, S, shared in ((True, T, (3, 2)), (True, T, (1, 2)), (False, T, (1, 2)), (False, 19, (3, 2))):
        for spec, _ in itertools.product([_random_spec(rng), _random_spec(rng)], range(8)):
            operands = {}
            for name, n in (("query_ids", T), *([] if same else [("key_ids", S)])):
                operands[name] = np.stack([_documents(rng, n, kind) for _ in range(np.prod(shared))])
                operands[name] = operands[name].reshape(*shared, n)
            if lengths:
                operands |= _lengths(rng, T, S)
            exact.append(_check(_spans_of(T, S, spec, batch=batch, **operands), T, S, spec, **operands))
    exact = np.concatenate([x.ravel() for x in exact])
    if kind == "any":
        assert exact.mean() < 0.2
    elif kind != "zeros behind":  # there, sides that begin with other documents may not be in one order
        assert exact.all()


def _lengths(rng, T, S):
    """Shared along one batch axis of (3, 2) each; some are 0, and some past the end."""
    return {
        "query_lens": rng.integers(0, T + 2, (3, 1)).astype(np.int32),
        "key_lens": rng.integers(0, S + 2, (1, 2)).astype(np.int32),
    }


def test_ids_of_self_attention_with_zeros_behind():
    ids = np.array([[1, 1, 1, 2, 2, 5, 5, 0, 0, 0], [3, 3, 4, 4, 4, 4, 6, 6, 6, 0]], np.int32)
    for spec in (AttentionSpec(), AttentionSpec(window_right=0), AttentionSpec(window_left=1, window_right=2)):
        got = _spans_of(10, 10, spec, batch=(2,), query_ids=ids)
        assert _check(got, 10, 10, spec, query_ids=ids, key_ids=ids).all()


def test_ids_of_any_length(rng):
    for T, S in ((1, 1), (1, 33), (128, 32), (129, 33), (300, 17)):
        q, k = (np.sort(rng.integers(0, 7, (1, n))).astype(np.int32) for n in (T, S))
        for ids in ((q, k), (rng.permutation(q, axis=-1), k), (q, rng.permutation(k, axis=-1))):
            operands = dict(zip(("query_ids", "key_ids"), ids, strict=True))
            for spec in (AttentionSpec(), AttentionSpec(window_left=9, window_right=0, bottom_right=True)):
                _check(_spans_of(T, S, spec, batch=(1,), **operands), T, S, spec, **operands)


SHARED = [(3, 2, 2, 11, 17), (1, 2, 1, 11, 17), (3, 1, 2, 1, 17), (3, 2, 1, 1, 17), (1, 1, 1, 11, 1), (1, 2, 2, 11, 1)]


@pytest.mark.parametrize("with_ids", [False, True], ids=["alone", "ids"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_masks(rng, with_ids, lengths):
    T, S = 11, 17
    for sizes in SHARED:
        for spec, _ in itertools.product([_random_spec(rng), _random_spec(rng)], range(6)):
            operands = {"mask": rng.random(sizes) < rng.choice([0.02, 0.3, 0.8, 0.99])}
            if with_ids:
                operands |= {
                    "query_ids": _documents(rng, T, rng.choice(KINDS))[None, None],
                    "key_ids": np.stack([_documents(rng, S, rng.choice(KINDS)) for _ in range(2)])[None],
                }
            if lengths:
                operands |= _lengths(rng, T, S)
            _check(_spans_of(T, S, spec, batch=(3, 2), **operands), T, S, spec, **operands)


I, J = np.arange(40)[:, None], np.arange(40)
DOCUMENTS = np.repeat([0, 1, 2], [13, 20, 7])
EXACT = {
    "causal": I >= J,
    "band": abs(I - J) <= 5,
    "sliding window": (I >= J) & (I - J < 7),
    "prefix of a language model": (I >= J) | (J < 9),
    "documents": DOCUMENTS[:, None] == DOCUMENTS,
    "causal documents": (DOCUMENTS[:, None] == DOCUMENTS) & (I >= J),
    "padded": (I < 30) & (J < 30),
    "padded in front": (I >= 8) & (J >= 8) & (I >= J),
    "chunks": I // 8 == J // 8,
    "everything": I >= 0 * J,
    "nothing": I + J < 0,
}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mask", EXACT.values(), ids=EXACT.keys())
def test_masks_that_are_spans(mask, heads):
    mask = np.broadcast_to(mask, (1, heads, 40, 40))
    exact = _check(_spans_of(40, 40, AttentionSpec(), batch=(1,), mask=mask), 40, 40, AttentionSpec(), mask=mask)
    assert exact.all()


def test_masks_that_are_not():
    spec = AttentionSpec()
    for mask in (
        (I >= J) & (I - J != 5),
        (I >= J) & (J != 30),
        I + J < 40,
        np.stack([I >= J, I <= J]),
        DOCUMENTS[:, None] != DOCUMENTS,
    ):
        mask = np.reshape(mask, (1, -1, 40, 40))
        assert not _check(_spans_of(40, 40, spec, batch=(1,), mask=mask), 40, 40, spec, mask=mask).any()


# Calls with them.


def _equipped(extras, query, key, value, spec):
    given = {"q": query, "k": key, "v": value} | {n: x for n, x in extras._asdict().items() if x is not None}
    return extras._replace(**_spans.of(list(given), list(given.values()), spec))


SPANNED = [case for case in cases.ALL + cases.PAIRS if {"mask", "query_segment_ids"} & set(case.operands)]


@pytest.mark.parametrize("case", SPANNED, ids=lambda case: case.id)
def test_calls_with_spans(case, monkeypatch):
    """Every case with a mask or ids, the CPU kernels being given what CUDA's are."""
    forward, backward = _ffi.forward, _ffi.backward

    def spanned_forward(q, k, v, extras, spec, implementation):
        return forward(q, k, v, _equipped(extras, q, k, v, spec), spec, implementation)

    def spanned_backward(q, k, v, out, lse, dout, dlse, extras, fixed, spec, implementation):
        extras = _equipped(extras, q, k, v, spec)
        return backward(q, k, v, out, lse, dout, dlse, extras, fixed, spec, implementation)

    monkeypatch.setattr(_ffi, "forward", spanned_forward)
    monkeypatch.setattr(_ffi, "backward", spanned_backward)
    got = evaluate._run(attention, case, "float32", "cpu", {"implementation": "cpu"})
    evaluate.check(got, case, "float32", "out", "lse", *evaluate.names(case))
    evaluate.check_zeros(got, case, "float32")


# What a program for CUDA says.

T, N, K, D = 4096, 4, 2, 64


def _program(function, *avals):
    return jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


def _avals(*ids, length=T, mask=None):
    qkv = [jax.ShapeDtypeStruct((2, length, heads, D), jnp.bfloat16) for heads in (N, K, K)]
    return [
        *qkv,
        *(jax.ShapeDtypeStruct(x, jnp.int32) for x in ids),
        *([] if mask is None else [jax.ShapeDtypeStruct(mask, bool)]),
    ]


def _by_ids(query, key, value, ids, others=None):
    others = ids if others is None else others
    masked = {"is_causal": True, "causal_alignment": "top_left"}
    return attention(query, key, value, **masked, query_segment_ids=ids, key_value_segment_ids=others)


def _by_mask(query, key, value, mask):
    return attention(query, key, value, mask=mask)


def _gradients(call):
    return jax.grad(lambda q, *xs: call(q, *xs).astype(jnp.float32).sum(), (0, 1, 2))


def _quadratic(text):
    """The types of arrays that have two axes of the sequence's length."""
    return {x for x in re.findall(r"tensor<([^>]*)>", text) if x.split("x").count(str(T)) > 1}


def _handed(text):
    """For each custom call, its first three operands, as the names that they have in the program."""
    return [
        re.findall(r"%\w+(?:#\d+)?", line.split("custom_call")[1])[:3]
        for line in text.splitlines()
        if re.search("custom_call @jax_flash2_[fb]", line)
    ]


def test_program_of_ids():
    """q, k and v as they came, nothing of T x T; and where both sides are one array, no sort."""
    for call in (_by_ids, _gradients(_by_ids)):
        text = _program(call, *_avals((2, T)))
        assert not _quadratic(text)
        assert "stablehlo.sort" not in text
        assert all(x == ["%arg0", "%arg1", "%arg2"] for x in _handed(text))
        assert not re.search(r"stablehlo\.(while|case|if)\b", text)  # on a GPU these wait for the host
        both = _program(call, *_avals((2, T), (1, T)))
        assert not _quadratic(both)
        assert "stablehlo.sort" in both
        assert f"tensor<2x{T}x2xi32>" in text


def test_program_of_a_mask():
    """q, k and v as they came; what a mask's own heads leave is cleared."""
    assert all(x == ["%arg0", "%arg1", "%arg2"] for x in _handed(_program(_by_mask, *_avals(mask=(1, 1, T, T)))))
    assert all(
        x == ["%arg0", "%arg1", "%arg2"] for x in _handed(_program(_gradients(_by_mask), *_avals(mask=(2, 1, T, T))))
    )
    own = _handed(_program(_by_mask, *_avals(mask=(2, N, T, T))))
    assert not {"%arg0", "%arg1", "%arg2"} & set(own[0])


def test_program_of_a_mask_of_keys():
    text = _program(_gradients(_by_mask), *_avals(mask=(2, 1, 1, T)))
    assert not _quadratic(text)
    assert all(x == ["%arg0", "%arg1", "%arg2"] for x in _handed(text))


def test_programs_keep_nothing_large():
    """As XLA plans it for the CPU, whose fusions are not CUDA's: no T x T array of any type lies between."""
    mask = jax.ShapeDtypeStruct((1, 1, T, T), bool)
    q, k, v = _avals()

    def spans(q, k, v, mask):
        return _spans.of(("q", "k", "v", "mask"), (q, k, v, mask), AttentionSpec())

    memory = jax.jit(spans).lower(q, k, v, mask).compile().memory_analysis()
    assert memory.temp_size_in_bytes < T * T // 2


@pytest.mark.parametrize("x64", [False, True])
def test_x64(x64):
    with jax.enable_x64(x64):
        for call, avals in (
            (_by_ids, _avals((2, T))),
            (_by_ids, _avals((1, T), (2, T))),
            (_by_mask, _avals(mask=(1, 1, T, T))),
            (_by_mask, _avals(mask=(1, N, 1, T))),
        ):
            text = _program(_gradients(call), *avals)
            rows = re.findall(r"custom_call @jax_flash2_[fb].*?: \((.*?)\) ->", text)
            assert len(rows) == 2
            assert all(re.search(rf"tensor<[12]x{T}x2xi32>, tensor<[12]x{T}x2xi32>, tensor<[12]xi32>", x) for x in rows)


def test_symbolic_shapes():
    b, t, s = export.symbolic_shape("b, t, s")
    q, k = (jax.ShapeDtypeStruct((b, n, heads, D), jnp.bfloat16) for n, heads in ((t, N), (s, K)))
    ids = [jax.ShapeDtypeStruct((b, n), jnp.int32) for n in (t, s)]
    masks = [jax.ShapeDtypeStruct(shape, bool) for shape in ((b, 1, t, s), (1, 1, t, s), (b, N, t, s), (b, 1, 1, s))]

    def by_ids(q, k, v, a, b, lens):
        return attention(
            q,
            k,
            v,
            is_causal=True,
            causal_alignment="bottom_right",
            query_segment_ids=a,
            key_value_segment_ids=b,
            key_value_seq_lengths=lens,
        )

    def program(function, *avals):
        return export.export(jax.jit(function), platforms=("cpu", "cuda"), disabled_checks=jax_flash2.export_checks())(
            *avals
        )

    program(_gradients(by_ids), q, k, k, *ids, jax.ShapeDtypeStruct((b,), jnp.int32))
    program(_gradients(_by_ids), q, q, q, ids[0])
    for mask in masks:
        program(_gradients(_by_mask), q, k, k, mask)


def test_symbolic_arithmetic(rng, on_cpu):
    """What comes out is what static shapes give."""
    t, s = export.symbolic_shape("t, s")
    spec = AttentionSpec(window_right=3, bottom_right=True)

    def by_ids(q, k, v, query_ids, key_ids):
        return _spans.of(("q", "k", "v", "query_ids", "key_ids"), (q, k, v, query_ids, key_ids), spec)

    def by_mask(q, k, v, mask):
        return _spans.of(("q", "k", "v", "mask"), (q, k, v, mask), spec)

    def shaped(n, m):
        qkv = [(2, n, 2, 8), (2, m, 2, 8), (2, m, 2, 8)]
        return [*qkv, (2, n), (2, m)], [*qkv, (1, 2, n, m)]

    values = [[np.zeros(x, np.float32) for x in shaped(21, 30)[0][:3]] for _ in range(2)]
    values[0] += [np.sort(rng.integers(-1, 4, (2, n))).astype(np.int32) for n in (21, 30)]
    values[1] += [rng.random((1, 2, 21, 30)) < 0.5]
    for function, shapes, xs in zip((by_ids, by_mask), shaped(t, s), values, strict=True):
        avals = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, xs, strict=True)]
        got, want = export.export(jax.jit(function), platforms=("cpu",))(*avals).call(*xs), jax.jit(function)(*xs)
        jax.tree.map(np.testing.assert_array_equal, got, want)


CALLS = {
    "ids": (_by_ids, _avals((2, T))),
    "two ids": (_by_ids, _avals((2, T), (2, T))),
    "mask": (_by_mask, _avals(mask=(2, 1, T, T))),
    "mask of keys": (_by_mask, _avals(mask=(2, 1, 1, T))),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_inside_shard_map(call, check_vma):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("x",))
    function, avals = CALLS[call]
    specs = (jax.P("x"),) * len(avals)
    sharded = jax.shard_map(_gradients(function), mesh=mesh, in_specs=specs, out_specs=specs[:3], check_vma=check_vma)
    assert f"tensor<1x{T}x2xi32>" in _program(sharded, *avals)


@pytest.mark.parametrize("call", CALLS)
def test_exported_from_an_explicit_mesh(call):
    """An exported program is not partitioned: spans are computed under the types of the mesh."""
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    function, avals = CALLS[call]
    with jax.set_mesh(mesh):
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P("x"))) for x in avals]
        export.export(jax.jit(_gradients(function)), platforms=("cuda",), disabled_checks=jax_flash2.export_checks())(
            *placed
        )


def test_programs_for_the_cpu_have_none():
    text = jax.jit(_gradients(_by_ids)).trace(*_avals((2, T))).lower().as_text()
    assert f"x{T}x2xi32" not in text
