"""The laws of src/core, proved in C++ by each compiler that builds them; what CUDA bodies make of operands and
scores, and which kernels a device gets, as far as a host can tell."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
STRICT = ["-std=c++20", "-O2", f"-I{ROOT / 'src'}"]
COMPILERS = {
    "cxx": [os.environ.get("CXX", "c++"), *STRICT, "-Wall", "-Wextra", "-Werror"],
    "nvcc": [os.environ.get("CUDACXX", "nvcc"), *STRICT, "-x=cu", "--expt-relaxed-constexpr", "-Werror=all-warnings"],
}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_laws(compiler: str, tmp_path: pathlib.Path) -> None:
    _passes(tmp_path, COMPILERS[compiler], ["tests/cpp/laws_test.cc"], seconds=300)


def _passes(tmp_path: pathlib.Path, command: list[str], sources: list[str], seconds: int) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    program, files = str(tmp_path / "program"), [str(ROOT / x) for x in sources]
    built = subprocess.run([*command, *files, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=seconds)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.endswith(", 0 failed\n")


def _passes_on_the_host(tmp_path: pathlib.Path, sources: list[str]) -> None:
    """Built by nvcc, which knows where CUDA's headers are, as plain C++."""
    includes = [f"-I{ROOT / 'tests/cpp/host'}", *STRICT, f"-I{tmp_path}"]  # the first stands in for parts of src
    _passes(tmp_path, [COMPILERS["nvcc"][0], *includes, "--cudart=none"], sources, seconds=60)


def test_operands_line_by_line(tmp_path: pathlib.Path) -> None:
    _passes_on_the_host(tmp_path, ["tests/cpp/operands_test.cc"])


def test_the_online_softmax(tmp_path: pathlib.Path) -> None:
    """That of Hopper, whose tiles look for no maximum: growing scores, removed ones, and the lowest numbers."""
    _passes_on_the_host(tmp_path, ["tests/cpp/softmax_test.cc"])


def test_which_kernels_a_device_gets(tmp_path: pathlib.Path) -> None:
    """By compute capability: none is refused that could run, none falls back in silence."""
    rows = [("sm90", dtype) for dtype in ("f16", "bf16")] + [("sm80", dtype) for dtype in ("f16", "bf16")]
    rows += [("fma", dtype) for dtype in ("f32", "f64")]
    rows = [f"JAX_FLASH2_INSTANCE({arch}, forward, {dtype}, 64, 64)" for arch, dtype in rows]
    (tmp_path / "instances.inc").write_text("\n".join(rows) + "\n")
    _passes_on_the_host(tmp_path, ["tests/cpp/dispatch_test.cc", "src/cuda/dispatch.cc"])
