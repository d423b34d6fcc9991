"""The scripts of the build: what makes a compiled CUDA unit unacceptable, and what the digest of the sources covers."""

import importlib.util
import pathlib
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def script(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "cmake" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nvcc_checked, digest = script("nvcc_checked"), script("source_digest")

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1a' for 'sm_90'
ptxas info    : Function properties for _Z1a
    16 bytes stack frame, {spilled} bytes spill stores, 5 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z1b' for 'sm_80'
ptxas info    : Function properties for _Z1b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
{note}
nvcc: 20.1 s, {memory} MiB
"""


@pytest.mark.parametrize(
    ("spilled", "memory", "note", "complaint"),
    [
        (3, 200, "", None),
        (4, 200, "", "u_128 for sm_90 spills 9 bytes; 8 are allowed"),
        (3, 2049, "", "u_128 needs 2049 MiB"),
        (3, 200, "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are", "C7510"),
    ],
)
def test_a_unit_is_judged(tmp_path, spilled, memory, note, complaint):
    table = tmp_path / "allowances.txt"
    table.write_text("# unit architecture bytes\nu_*  sm_90  8  # why\nv_128  sm_90  99\nu_128  sm_80  99\n")
    found = nvcc_checked.complaints("u_128", LOG.format(spilled=spilled, memory=memory, note=note), table)
    assert len(found) == (complaint is not None)
    assert all(complaint in line for line in found)


def test_allowances_name_units_that_exist():
    listed = (ROOT / "src/cuda/instances.cmake").read_text()
    for line in (ROOT / "cmake/spill_allowances.txt").read_text().splitlines():
        if row := line.split("#")[0].split():
            arch, direction, dtype, _ = row[0].split("_")
            assert arch in listed, line
            assert direction in listed, line
            assert dtype == "*" or dtype in listed, line


def test_the_digest_sees_names_and_bytes(tmp_path):
    def tree(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        value = digest.source_digest(tmp_path)
        for name in files:
            (tmp_path / name).unlink()
        return value

    base = tree({"CMakeLists.txt": "", "src/a.h": "x", "src/b/c.cu": "y"})
    assert base == tree({"src/b/c.cu": "y", "src/a.h": "x", "CMakeLists.txt": "", "README.md": "not native"})
    others = [
        tree({"CMakeLists.txt": " ", "src/a.h": "x", "src/b/c.cu": "y"}),
        tree({"CMakeLists.txt": "", "src/a.h": "y", "src/b/c.cu": "x"}),
        tree({"CMakeLists.txt": "", "src/a.hx": "", "src/b/c.cu": "y"}),
        tree({"CMakeLists.txt": "", "src/a.h": "x", "src/c.cu": "y"}),
    ]
    assert len({base, *others}) == 5
