"""The digest says which sources a module was built from, and a record of other sources is called stale, loudly."""

import json
import types

import record

from jax_flash2 import _cpu, _native


def test_the_native_module_is_built_from_this_tree():
    assert _cpu.source_digest() == record.tree_digest(), "build again: pip install -e ."


def test_a_build_that_lacks_kernels_is_no_proof(monkeypatch):
    kernels = (("sm80", "bf16"), ("sm80", "f16"), ("fma", "f32"), ("fma", "f64"))
    rows = [(arch, "forward", dtype, 64, 64) for arch, dtype in kernels]
    device = {"name": "a GPU", "compute_capability": (9, 0), "arch": "sm90"}

    def lacking(instances, devices):
        module = types.SimpleNamespace(instances=lambda: instances, devices=lambda: devices)
        monkeypatch.setattr(_native, "cuda", module)
        return record.lacking()

    assert lacking(rows, []) == []
    assert lacking(rows, [device]) == ["sm90"]
    assert lacking(rows[:2], [device | {"arch": "sm80"}]) == ["float32", "float64"]


def test_fresh_and_stale(tmp_path, capsys):
    path = tmp_path / "runs.json"
    run = {"date": "2026-01-01", "device": "a GPU", "passed": 3}
    fresh, other = (run | {"source_digest": digest} for digest in (record.tree_digest(), "other"))
    fresh, other = (run | {"failed": 0} for run in (fresh, other))
    cut = fresh | {"unfinished": "the power went"}
    failed = fresh | {"failed": 2, "failures": ["a", "b"]}
    a, b = (fresh | {"again": [name]} for name in "ab")
    for runs, status, said in (
        ([], 1, "no run is recorded"),
        ([other], 1, "STALE"),
        ([fresh, other], 0, "passed 3 tests on a GPU"),
        ([other, cut], 1, "UNFINISHED"),
        ([fresh, cut], 0, "passed 3 tests on a GPU"),
        ([fresh, failed], 1, "FAILED: on these native sources a, b failed"),
        ([failed, a], 1, "sources b failed"),
        ([failed, a, other, b], 0, "passed 3 tests on a GPU (2026-01-01), and 2 when run again"),
        ([a, b, failed], 1, "a, b failed"),
        ([a], 1, "were not all tests"),
    ):
        path.write_text(json.dumps(runs))
        assert record.main(path) == status
        assert said in capsys.readouterr().out


def test_the_committed_record_is_a_list_of_runs_that_name_their_failures():
    for run in json.loads(record.RUNS.read_text()):
        assert run["failed"] == len(run.get("failures", []))
        assert run["passed"] > 0
        assert {"date", "device", "devices", "jax", "skipped", "source_digest"} <= run.keys()
