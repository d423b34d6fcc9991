"""Programs that leave the process: compiled for another platform, exported, and exported by an older version.

tests/exported holds the StableHLO of programs as the versions named in the files wrote them, for CPU and CUDA at once,
with every option and operand of that version. Later versions must still run them. When a release adds an option or an
operand (never otherwise), write new files, with the oldest JAX served, and keep the old ones:

    python tests/test_export.py
"""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable

import jax_flash2
from jax_flash2 import _lowering, _native, attention
from jax_flash2._spec import AttentionSpec

FOLDER = pathlib.Path(__file__).parent / "exported"
B, T, S, N, K, D, DV = 2, 7, 9, 4, 2, 12, 8
SHAPES = {
    "query": (B, T, N, D),
    "key": (B, S, K, D),
    "value": (B, S, K, DV),
    "scale": (B,),
    "query_lens": (B,),
    "key_lens": (B,),
    "dout": (B, T, N, DV),
    "dlse": (B, T, N),
}


def _forward(query, key, value, scale, query_lens, key_lens):
    return jax_flash2.attention(
        query,
        key,
        value,
        scale=scale,
        local_window_size=(4, 2),
        causal_alignment="bottom_right",
        logits_soft_cap=3.0,
        query_seq_lengths=query_lens,
        key_value_seq_lengths=key_lens,
        deterministic=True,
        return_residual=True,
    )


def _gradients(query, key, value, scale, query_lens, key_lens, dout, dlse):
    primals, pullback = jax.vjp(lambda *xs: _forward(*xs, query_lens, key_lens), query, key, value, scale)
    return *primals, *pullback((dout, dlse))


def _plain(query, key, value):
    return jax_flash2.attention(query, key, value, scale=0.3, is_causal=True, causal_alignment="top_left")


def _gradients_of_plain(*xs):
    return jax.grad(lambda *xs: _plain(*xs).astype(jnp.float32).sum(), (0, 1, 2))(*xs)


PROGRAMS = {"forward": _forward, "gradients": _gradients, "plain": _plain}
FIXTURES = [(version, name) for version in ("0.1",) for name in PROGRAMS]


def _arguments(function):
    names = dict.fromkeys(function.__code__.co_varnames[: function.__code__.co_argcount])
    return [calls.random(0, name, SHAPES[name], jnp.bfloat16) for name in names]


def _export(function, *args):
    return export.export(jax.jit(function), platforms=("cpu", "cuda"), disabled_checks=jax_flash2.export_checks())(
        *args
    )


@pytest.mark.parametrize(("version", "name"), FIXTURES)
def test_programs_of_older_versions_run(version, name):
    """JAX reads its own serialised form for half a year, StableHLO for years: so the module alone is kept, and its
    types are those of the same program today."""
    args = _arguments(PROGRAMS[name])
    today = _export(PROGRAMS[name], *args)
    old = dataclasses.replace(today, mlir_module_serialized=(FOLDER / f"{version}_{name}.mlirbc").read_bytes())
    calls.assert_close(jax.jit(old.call)(*args), jax.jit(PROGRAMS[name])(*args), jnp.bfloat16)


def test_serialised_program_and_its_gradient():
    *args, dout, dlse = _arguments(_gradients)
    loaded = export.deserialize(_export(_forward, *args).serialize(vjp_order=1))
    primals, pullback = jax.vjp(lambda *xs: loaded.call(*xs, *args[4:]), *args[:4])
    want = jax.jit(_gradients)(*args, dout, dlse)
    calls.assert_close((*primals, *pullback((dout, dlse))), want, jnp.bfloat16)


RUNNER = """
    import pathlib, sys
    import numpy as np
    import jax
    from jax import export

    folder = pathlib.Path(sys.argv[1])
    if sys.argv[2] == "with us":
        import jax_flash2
    loaded = export.deserialize((folder / "program").read_bytes())
    args = [jax.numpy.asarray(x) for x in np.load(folder / "args.npz").values()]
    primals, pullback = jax.vjp(loaded.call, *args)
    results = [*primals, *pullback((primals[0] * 0 + 1, primals[1] * 0 + 1))]
    np.savez(folder / "results.npz", *results)
"""


def test_a_fresh_process_runs_a_serialised_program(tmp_path, backend):
    """With its gradient, after importing the package; without it, an error that names the target, and no crash."""
    args = [x.astype(jnp.float32) for x in _arguments(_plain)]

    def function(*xs):
        return jax_flash2.attention(*xs, is_causal=True, causal_alignment="top_left", return_residual=True)

    exported = export.export(jax.jit(function), platforms=(backend,), disabled_checks=jax_flash2.export_checks())
    (tmp_path / "program").write_bytes(exported(*args).serialize(vjp_order=1))
    np.savez(tmp_path / "args.npz", *args)

    def run(how):
        command = [sys.executable, "-P", "-c", textwrap.dedent(RUNNER), str(tmp_path), how]
        environment = os.environ | {"JAX_PLATFORMS": backend, "XLA_FLAGS": ""}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    alone = run("alone")
    assert alone.returncode == 1  # a Python exception; a crash would be negative
    assert "jax_flash2_forward_v1" in alone.stderr
    done = run("with us")
    assert done.returncode == 0, done.stderr
    with jax.default_device(jax.devices(backend)[0]):
        primals, pullback = jax.vjp(function, *args)
        want = [*primals, *pullback(jax.tree.map(jnp.ones_like, primals))]
    calls.assert_close(list(np.load(tmp_path / "results.npz").values()), [np.asarray(x) for x in want], jnp.float32)


CACHED = """
    import sys
    import jax, jax.numpy as jnp
    from jax import monitoring
    from jax_flash2 import attention

    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    x = jnp.sin(jnp.arange(960.0)).reshape(4, 10, 3, 8)
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
    hits = []
    monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
    for window in (0, 3):
        def loss(x):
            return jnp.sum(attention(x, x, x, local_window_size=window, logits_soft_cap=0.5) ** 2)

        gradient = jax.jit(jax.grad(loss))(x)
        print(float(jnp.abs(gradient).sum()))
    print(sum(hits))
"""


def test_persistent_compilation_cache(tmp_path):
    """The second process compiles nothing that the first did, for one device and for four; and a cache that overlooks
    what the partitioner calls back, as it is told here, takes no window for another."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(CACHED)]
    values = []
    for devices in (1, 4):
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
        for _ in range(2):
            run = [*command, str(tmp_path / str(devices))]
            done = subprocess.run(run, env=os.environ | flags, capture_output=True, text=True, timeout=300, check=True)
            values.append([float(x) for x in done.stdout.split()])
    assert values[0][2] + 2 <= values[1][2]
    assert values[2][2] + 2 <= values[3][2]
    assert abs(values[0][0] - values[0][1]) > 1
    for other in values[1:]:
        np.testing.assert_allclose(other[:2], values[0][:2], rtol=1e-5)


def test_ahead_of_time():
    """lower, compile, call; and an executable for several devices that is serialised and loaded again."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")), ("x",))
    args = [jax.device_put(x, jax.NamedSharding(mesh, jax.P())) for x in _arguments(_gradients)]
    compiled = jax.jit(_gradients).lower(*args).compile()
    want = jax.jit(_gradients)(*args)
    calls.assert_close(compiled(*args), want, jnp.bfloat16)
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled), backend="cpu")
    calls.assert_close(loaded(*args), want, jnp.bfloat16)


@pytest.mark.parametrize("spec", [jax.P("x"), jax.P(None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("manual", [False, True], ids=["jit", "shard_map"])
def test_exported_programs_for_several_devices(manual, spec):
    """They hold no Python, so no partitioning: right, but what is split is gathered, unless by shard_map."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]), ("x",))
    args = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in _arguments(_plain)]
    function = _gradients_of_plain
    if manual:
        function = jax.shard_map(function, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3)
    exported = export.export(jax.jit(function), platforms=("cpu",), disabled_checks=jax_flash2.export_checks())(*args)
    compiled = jax.jit(export.deserialize(exported.serialize()).call).lower(*args).compile()
    calls.assert_close(compiled(*args), jax.jit(_gradients_of_plain)(*args), jnp.bfloat16)
    assert ("all-gather" in compiled.as_text()) != manual


def test_symbolic_shapes():
    b, t, s = export.symbolic_shape("b, t, s")
    shapes = [(b, t, N, D), (b, s, K, D), (b, s, K, DV), (b,), (b,), (b,), (b, t, N, DV), (b, t, N)]
    args = _arguments(_gradients)
    avals = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, args, strict=True)]
    loaded = export.deserialize(_export(_gradients, *avals).serialize())
    shorter = [x[:1] for x in args]
    shorter[1:3] = [x[:, :5] for x in shorter[1:3]]
    for xs in (args, shorter):
        calls.assert_close(loaded.call(*xs), jax.jit(_gradients)(*xs), jnp.bfloat16)


def test_static_lengths_are_clamped_before_they_are_narrowed():
    """2**32 + 2 is past any length; cut to 32 bits it would be 2."""
    (s,) = export.symbolic_shape("s")

    def call(query, key):
        return attention(query, key, key, key_value_seq_lengths=np.asarray([2**32 + 2, 3], np.int64))

    query, key = (jax.random.normal(jax.random.key(i), (2, 3 + i, n, D), jnp.bfloat16) for i, n in ((0, N), (4, K)))
    loaded = _export(call, query, jax.ShapeDtypeStruct((2, s, K, D), key.dtype))
    np.testing.assert_array_equal(loaded.call(query, key), jax.jit(call)(query, key))
    np.testing.assert_array_equal(loaded.call(query, key)[0], attention(query[:1], key[:1], key[:1])[0])


def test_export_checks_are_needed():
    with pytest.raises(ValueError, match="jax_flash2_forward_v1"):
        export.export(jax.jit(_plain))(*_arguments(_plain))


# What a program for CUDA hands its handlers, read from its text. No GPU is needed.


def _custom_calls(function, args, platform="cuda"):
    """For each custom call its target, its operands' and results' types, and its attributes."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    calls = []
    for line in text.splitlines():
        if found := re.search(
            r"custom_call @(jax_flash2\w+)\(.*backend_config = \{(.*?)\}.* : \((.*)\) -> \(?(.*)\)?", line
        ):
            target, attributes, operands, results = found.groups()
            sides = [re.findall(r"tensor<(.*?)>", side) for side in (operands, results)]
            calls.append((target, *sides, dict(pair.split(" = ") for pair in attributes.split(", "))))
    return calls


def test_cuda_program():
    """D padded to a multiple of 8, Dv, which is one, as it is; workspaces as results. Absent arrays have size zero, and
    are left out behind the last that is present."""
    forward, backward = _custom_calls(_gradients, _arguments(_gradients))
    q, k, v, out = f"{B}x{T}x{N}x16xbf16", f"{B}x{S}x{K}x16xbf16", f"{B}x{S}x{K}x8xbf16", f"{B}x{T}x{N}x8xbf16"
    lse, lens = f"{B}x{N}x{T}xf32", f"{B}xi32"
    queue = f"{B}x{N}xi32"
    assert forward[:3] == ("jax_flash2_forward_v1", [q, k, v, f"{B}xf32", lens, lens], [out, lse, queue])
    operands = [q, k, v, out, lse, out, lse, f"{B}xf32", lens, lens]
    accumulators = [f"{B}x{N}x{T}x16xf32", *[f"{B}x{K}x{S}x{width}xf32" for width in (16, 8)]]
    results = [q, k, v, lse, *accumulators, f"{B}x{N}x2xi32", lse]
    assert backward[:3] == ("jax_flash2_backward_v1", operands, results)


def test_cuda_program_without_options():
    query, key, value = (jnp.zeros((B, T, N, 16), jnp.float16) for _ in range(3))
    forward, backward = _custom_calls(_gradients_of_plain, (query, key, value))
    q, lse = f"{B}x{T}x{N}x16xf16", f"{B}x{N}x{T}xf32"
    assert forward[1:3] == ([q, q, q], [q, lse, f"{B}x{N}xi32"])
    assert backward[1] == [q, q, q, q, lse, q]
    workspaces = [lse, f"{B}x{N}x{T}x16xf32", "0xf32", "0xf32", f"{B}x{N}x2xi32"]
    assert backward[2] == [q, q, q, *workspaces]


@pytest.mark.parametrize(("dtype", "width"), [("f32", 9), ("f64", 11)])
def test_cuda_program_in_more_bits(dtype, width):
    """Rows of 16 bytes are whole at multiples of 4 or 2. Sums are made in registers: delta is the only workspace."""
    shapes = (B, T, N, width), (B, S, K, width), (B, S, K, 8)
    with jax.enable_x64(dtype == "f64"):
        forward, backward = _custom_calls(_gradients_of_plain, [jnp.zeros(shape) for shape in shapes])
    q, k = f"{B}x{T}x{N}x12x{dtype}", f"{B}x{S}x{K}x12x{dtype}"
    v, out, lse = f"{B}x{S}x{K}x8x{dtype}", f"{B}x{T}x{N}x8x{dtype}", f"{B}x{N}x{T}x{dtype}"
    assert forward[2] == [out, lse]
    assert backward[2] == [q, k, v, lse]


@pytest.mark.parametrize("check_vma", [True, False])
def test_cuda_program_inside_shard_map(check_vma):
    """Padding there is traced anew, while compiling, with types that vary."""
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("x",))
    specs = (jax.P("x"), jax.P(), jax.P())
    args = [x[:size] for x, size in zip(_arguments(_plain), (2, 1, 1), strict=True)]
    sharded = jax.shard_map(_gradients_of_plain, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma)
    (_, backward) = _custom_calls(sharded, args)
    assert backward[2][:3] == [f"1x{T}x{N}x16xbf16", f"1x{S}x{K}x16xbf16", f"1x{S}x{K}x8xbf16"]


def test_cuda_program_in_an_explicit_mesh():
    """Padded before it is handed to the partitioner, with the types that the mesh asks for."""
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("x"))) for x in _arguments(_plain)]
        text = jax.jit(_gradients_of_plain).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    forward, backward = (line for line in text.splitlines() if "@CustomSPMDPartitioning" in line)
    q, k, v, out = f"{B}x{T}x{N}x16xbf16", f"{B}x{S}x{K}x16xbf16", f"{B}x{S}x{K}x8xbf16", f"{B}x{T}x{N}x8xbf16"
    assert re.findall(r"tensor<(.*?)>", forward.split(" -> ")[-1]) == [out, f"{B}x{N}x{T}xf32"]
    assert re.findall(r"tensor<(.*?)>", backward.split(" -> ")[-1]) == [q, k, v]


def test_cpu_program_has_no_workspace():
    (_, backward) = _custom_calls(_gradients, _arguments(_gradients), "cpu")
    assert backward[2][3:8] == ["0xf32", "0xf32", "0xf32", "0xf32", "0xi32"]


@pytest.mark.parametrize("x64", [False, True])
def test_attributes_are_the_spec(x64):
    """By name, in the types that the handlers insist on, whatever jax_enable_x64 says."""
    with jax.enable_x64(x64):
        (forward,) = _custom_calls(lambda *xs: _forward(*xs)[0], _arguments(_forward))
        types_of = {float: "f64", int: "i64", bool: "bool"}
        attributes = {name: text.split(" : ")[-1] if " : " in text else "bool" for name, text in forward[3].items()}
        fields = {field.name: types_of[field.type] for field in dataclasses.fields(AttentionSpec)}
        assert attributes == fields
        assert forward[3]["window_left"] == "4 : i64"
        assert forward[3]["bottom_right"] == "true"


@pytest.mark.parametrize(("implementation", "platform"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_insisting_on_another_platform(implementation, platform):
    def call(*xs):
        return jax_flash2.attention(*xs, implementation=implementation)

    with pytest.raises(NotImplementedError, match=f"implementation='{implementation}'.*compiled for '{platform}'"):
        _custom_calls(call, _arguments(_plain), platform)


def test_install_without_cuda_code_says_so_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_native, "cuda", None)
    monkeypatch.setattr(_native, "cuda_missing", "was built without CUDA code")
    monkeypatch.setattr(_lowering, "_has_cuda_device", lambda: True)
    with pytest.raises(RuntimeError, match=r"built without CUDA code.*nvcc is on PATH.*JAX_FLASH2_FETCH_NVCC=1"):
        _custom_calls(lambda *xs: _plain(*xs), _arguments(_plain))  # a function that no cache knows


def test_head_dims_that_were_not_compiled(monkeypatch):
    rows = [("sm80", direction, "bf16", 64, 64) for direction in ("forward", "backward")]
    monkeypatch.setattr(_native, "cuda", types.SimpleNamespace(instances=lambda: rows))
    query, key, value = (jnp.zeros((B, T, N, 72), jnp.bfloat16) for _ in range(3))
    with pytest.raises(
        NotImplementedError, match=r"head dims up to 64 for bfloat16 on CUDA, got 72.*JAX_FLASH2_HEAD_DIMS"
    ):
        _custom_calls(lambda *xs: _plain(*xs), (query, key, value))
    with pytest.raises(NotImplementedError, match=r"without the CUDA kernels for float32: cast.*JAX_FLASH2_KERNELS"):
        _custom_calls(lambda *xs: _plain(*xs), [x.astype(jnp.float32) for x in (query, key, value)])


def _write() -> None:
    FOLDER.mkdir(exist_ok=True)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # the paths of this machine are nobody's business
    version = ".".join(jax_flash2.__version__.split(".")[:2])
    for name, function in PROGRAMS.items():
        path = FOLDER / f"{version}_{name}.mlirbc"
        path.write_bytes(_export(function, *_arguments(function)).mlir_module_serialized)
        print(path, "written with jax", jax.__version__)


if __name__ == "__main__":
    _write()
