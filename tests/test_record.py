"""The digest says which sources a module was built from, and a record of other sources is called stale, loudly."""

import json

import record

from jax_flash2 import _cpu


def test_the_native_module_is_built_from_this_tree():
    assert _cpu.source_digest() == record.tree_digest(), "build again: pip install -e ."


def test_fresh_and_stale(tmp_path, capsys):
    path = tmp_path / "runs.json"
    run = {"date": "2026-01-01", "device": "a GPU", "passed": 3}
    fresh, other = (run | {"source_digest": digest} for digest in (record.tree_digest(), "other"))
    cut = fresh | {"failed": 0, "unfinished": "the power went"}
    for runs, status, said in (
        ([], 1, "no run is recorded"),
        ([other], 1, "STALE"),
        ([fresh, other], 0, "passed 3 tests on a GPU"),
        ([other, cut], 1, "UNFINISHED"),
        ([fresh, cut], 0, "passed 3 tests on a GPU"),
    ):
        path.write_text(json.dumps(runs))
        assert record.main(path) == status
        assert said in capsys.readouterr().out


def test_the_committed_record_is_a_list_of_runs_without_failures():
    for run in json.loads(record.RUNS.read_text()):
        assert run["failed"] == 0
        assert run["passed"] > 0
        assert {"date", "device", "devices", "jax", "skipped", "source_digest"} <= run.keys()
