"""The laws of src/core, proved in C++ by each compiler that builds them."""

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
    command = COMPILERS[compiler]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    program = tmp_path / "laws_test"
    built = subprocess.run(
        [*command, str(ROOT / "tests/cpp/laws_test.cc"), "-o", str(program)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.endswith(", 0 failed\n")
