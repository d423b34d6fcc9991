"""The bench: its arithmetic, its judgement of answers and its output. Nothing here asserts a speed."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last, so that an installed jax_flash2 goes before the tree's uncompiled one

from bench import accuracy, cases, report, run, supervise  # noqa: E402
from bench.check import Check  # noqa: E402
from bench.results_file import ResultsFile  # noqa: E402
from bench.rivals import Implementation, JaxImplementation, JaxNN, Ours, find, make_inputs  # noqa: E402
from bench.timing import Budget, Figure, Protocol  # noqa: E402


@pytest.fixture(autouse=True)
def _what_jax_nn_needs():
    """Implicit promotion in its own code, and a device that does not round its float32 products to TF32."""
    with jax.numpy_dtype_promotion("standard"), jax.default_device(jax.devices("cpu")[0]):
        yield


QUICK = Protocol(rounds=2, batches=1, batch=0.0, rest=0.0)
SMALL = [dataclasses.replace(case, dtype="float32") for case in cases.small()]
UNEQUAL = cases.Case(b=2, sq=5, sk=9, h=4, hk=2, d=8, causal=True, dtype="float32")


@pytest.mark.parametrize("case", [*SMALL, UNEQUAL, dataclasses.replace(UNEQUAL, sq=9, sk=5)], ids=lambda c: c.label)
def test_kept_pairs_are_those_of_the_mask(case):
    i, j = np.indices((case.sq, case.sk))
    keep = np.ones_like(i, bool)
    if case.causal:
        keep &= j <= i + case.sk - case.sq
    if case.window is not None:
        keep &= j >= i + case.sk - case.sq - case.window
    if case.parts:
        documents = np.repeat(range(len(case.parts)), case.parts)
        keep &= documents[:, None] == documents
    assert case.kept() == keep.sum()
    np.testing.assert_array_equal(case.mask(), keep)


def test_cases_of_features_have_something_to_be_measured_by():
    listed = cases.features()
    assert len(set(listed)) == len({case.label for case in listed}) == len(listed)
    assert {case.told for case in listed} == set(cases.TOLD)
    for case in listed:
        assert case.plain() in listed
        assert case.told or case == case.plain()
    for case in listed:  # the same work, but for the pairs between documents
        if case.told == "mask" or (case.told == "varlen" and len(set(case.parts)) == 1):
            assert case.flops("step") == case.plain().flops("step")
    with pytest.raises(ValueError, match="must fill the length"):
        cases.Case(b=1, sq=9, h=1, d=8, causal=False, parts=(4, 4), told="ids")


def test_cases_of_operands_have_something_to_be_measured_by():
    listed = cases.operands()
    assert len(set(listed)) == len({case.label for case in listed}) == len(listed)
    for here in (listed, cases.small()):
        assert {case.scored for case in here} == set(cases.SCORED)
    for case in listed:
        assert case.plain() in listed
        assert case.scored or case == case.plain()
        assert case.flops("step") == case.plain().flops("step")
    with pytest.raises(ValueError, match="scored must be one of"):
        cases.Case(b=1, sq=9, h=1, d=8, causal=False, scored="dropout")
    with pytest.raises(ValueError, match="told its mask"):
        cases.Case(b=1, sq=9, h=1, d=8, causal=True, told="mask", scored="bias")
    with pytest.raises(ValueError, match="unequal lengths"):
        cases.Case(b=1, sq=9, sk=5, h=1, d=8, causal=False, scored="alibi")


def test_flops_of_the_paper():
    case = cases.Case(b=2, sq=64, h=3, d=16, causal=False)
    assert case.flops("fwd") == 4 * 2 * 3 * 64 * 64 * 16
    assert case.flops("bwd") == 2.5 * case.flops("fwd")
    assert case.flops("step") == 3.5 * case.flops("fwd")


def test_the_grid_holds_16k_tokens_of_2048_channels():
    assert len(cases.grid()) == 36
    assert {(case.b * case.sq, case.h * case.d) for case in cases.grid()} == {(16384, 2048)}


class Broken(JaxImplementation):
    """jax.nn's attention with a fault."""

    name, gpu_only, half_only, told, scored = "broken", False, False, cases.TOLD, cases.SCORED

    def __init__(self, fault):
        self.fault = fault

    def attention(self, case):
        if self.fault == "operand":
            return lambda q, k, v, *ignored: JaxNN("xla").attention(case.plain())(q, k, v)
        if self.fault == "operand's sign":
            ours = Ours().attention(case)
            return lambda q, k, v, operand: ours(q, k, v, -operand)
        right = JaxNN("xla").attention(case)
        if self.fault == "scale":
            return lambda q, k, v: right(1.02 * q, k, v)
        if self.fault == "nan":
            return lambda q, k, v: right(q, k, v).at[..., -1, :, 0].set(np.nan)
        if self.fault == "gradient":
            return lambda q, k, v: right(q, k, v) + 0.02 * (k - jax.lax.stop_gradient(k)).sum()
        if self.fault == "mask":
            return lambda q, k, v, mask: right(q, k, v, mask | (np.arange(case.sk) == 0))
        return right

    def operands(self, case, inputs):
        return JaxNN("xla").operands(case, inputs)


@pytest.mark.parametrize("case", [*SMALL, dataclasses.replace(SMALL[0], dtype="bfloat16")], ids=lambda c: c.label)
def test_a_right_answer_passes(case):
    inputs = make_inputs(case, 1)
    loaded = (Ours() if case.scored else Broken(None)).load(case, inputs)
    for mode in cases.PASSES:
        assert Check(case, inputs, 3).fault(loaded.answer(mode)) is None


SCORED = [x for x in SMALL if x.scored]


@pytest.mark.parametrize("scored", cases.SCORED)
@pytest.mark.parametrize("sq", [5, 9])
def test_what_acts_on_scores_follows_the_alignment(sq, scored):
    case = dataclasses.replace(UNEQUAL, sq=sq, sk=14 - sq, scored=scored)
    inputs = make_inputs(case, 1)
    loaded = Ours().load(case, inputs)
    for mode in cases.PASSES:
        assert Check(case, inputs, 3).fault(loaded.answer(mode)) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SCORED, ids=lambda c: c.label)
def test_a_call_that_ignores_what_acts_on_scores_is_not_timed(case, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    modes = cases.PASSES if dtype == "float32" else ["bwd", "step"]  # 16 bits excuse more than so few keys change
    bench = run.Run([Broken("operand"), JaxNN("xla"), Ours()], modes, QUICK, seed=0)
    timers = bench.prepare(case)
    right = ["jax_xla", "jax_flash2"] if case.scored == "bias" else ["jax_flash2"]
    assert [list(x) for x in timers.values()] == [right] * len(modes)
    reasons = {(x["impl"], x["reason"].split()[0]) for x in bench.left_out}
    assert reasons == {("broken", "wrong")} | ({("jax_xla", "is")} if len(right) == 1 else set())


@pytest.mark.parametrize("case", [x for x in SCORED if x.scored != "softcap"], ids=lambda c: c.label)
def test_a_call_that_takes_an_operand_the_wrong_way_is_not_timed(case):
    bench = run.Run([Broken("operand's sign")], cases.PASSES, QUICK, seed=0)
    assert not any(bench.prepare(case).values())
    assert {x["reason"].split()[0] for x in bench.left_out} == {"wrong"}


@pytest.mark.parametrize("case", [x for x in SMALL if x.told], ids=lambda c: c.label)
def test_a_call_that_reads_too_much_is_not_timed(case):
    bench = run.Run([Broken("mask"), JaxNN("xla"), Ours()], ["fwd", "step"], QUICK, seed=0)
    timers = bench.prepare(case)
    assert [list(x) for x in timers.values()] == [["jax_xla", "jax_flash2"]] * 2
    assert {(x["impl"], x["reason"][:5]) for x in bench.left_out} == {("broken", "wrong")}


@pytest.mark.parametrize(("fault", "mode"), [("scale", "fwd"), ("scale", "bwd"), ("nan", "fwd"), ("gradient", "step")])
def test_a_wrong_answer_is_not_timed(fault, mode):
    bench = run.Run([Broken(fault), JaxNN("xla")], [mode], QUICK, seed=0)
    timers = bench.prepare(SMALL[0])
    assert list(timers[mode]) == ["jax_xla"]
    assert [x["impl"] for x in bench.left_out] == ["broken"]
    assert bench.left_out[0]["reason"].startswith("wrong")


def test_what_raises_is_left_out_with_its_reason():
    class Raises(Implementation):
        name = "raises"

        def load(self, case, inputs):
            raise RuntimeError("out of paper\nand ink")

    bench = run.Run([Raises()], ["fwd", "bwd"], QUICK, seed=0)
    assert bench.prepare(SMALL[0]) == {"fwd": {}, "bwd": {}}
    assert [x["reason"] for x in bench.left_out] == ["RuntimeError: out of paper"] * 2


def test_absent_rivals_say_why():
    here, missing = find()
    assert {"jax_flash2", "jax_xla"} <= {x.name for x in here}
    rivals = {"jax_cudnn", "torch_fa2", "torch_cudnn", "tokamax", "dew_fa3", "fa4"}
    assert {x.name for x in here} | set(missing) >= rivals
    assert all(missing.values())
    with pytest.raises(ValueError, match="known"):
        find(["flash_attention_9"])


def test_means_compare_cell_by_cell():
    cell = cases.Case(b=1, sq=64, h=2, d=16, causal=True, dtype="float32").row()
    rows = []
    for d, sq, ours, a, b in ((16, 64, 10.0, 20.0, 40.0), (32, 64, 10.0, 5.0, None), (32, 96, 10.0, 10.0, 20.0)):
        times = {"jax_flash2": ours, "a": a, "b": b}
        rows += [{"impl": name, "mode": "fwd", **cell, "d": d, "sq": sq, "us": us} for name, us in times.items() if us]
    means = {(x["d"], x["rival"]): (x["cells"], x["mean"], x["worst"]) for x in report.geometric_means(rows)}
    assert means[None, "a"] == (3, pytest.approx(1.0), 0.5)
    assert means[None, "b"] == (2, pytest.approx(8**0.5), 2.0)
    assert means[None, "best"] == (3, pytest.approx(1.0), 0.5)
    assert means[32, "a"] == (2, pytest.approx(0.5**0.5), 0.5)
    assert (16, "a") not in means  # one cell is no mean
    assert "0.50" in report.summary(rows)


def test_bars_are_read_off_the_rows():
    rows = []
    for t, us in ((1000, 10.0), (1024, 8.0)):
        case = cases.Case(b=1, sq=t, h=2, d=16, causal=True, dtype="float32")
        for name, times in (("jax_flash2", us), ("a", 9.0), ("b", 20.0)):
            row = {"impl": name, "mode": "fwd", **case.row(), "us": times, "tflops": case.flops("fwd") / times / 1e6}
            rows.append(row | {"of_matmul": 0.5})
    said = report.bars(rows, {"matmul": {"tflops": 700.0}})
    assert "geometric mean 1.006, lowest 0.900, 2 cells, 1 below 0.95" in said
    assert "0.900 (a) float32 d16 causal t1000 h2/2 b1" in said
    assert f"T = 1000 at {rows[0]['tflops'] / rows[3]['tflops']:.3f} of T = 1024" in said


def test_bars_of_features_are_read_off_the_rows():
    rows = []
    documents = cases.Case(b=1, sq=64, h=2, d=16, causal=False, dtype="float32", parts=(16,) * 4, told="ids")
    masked = cases.Case(b=1, sq=64, h=2, d=16, causal=True, dtype="float32", told="mask")
    biased = cases.Case(b=1, sq=64, h=2, d=32, causal=True, dtype="float32", scored="bias")
    times = ((documents, 3.0), (documents.plain(), 10.0), (masked, 6.6), (masked.plain(), 6.0))
    for case, us in (*times, (biased, 9.0), (biased.plain(), 6.0)):
        row = {"impl": "jax_flash2", "mode": "fwd", **case.row(), "us": us, "tflops": 1.0, "of_matmul": 0.5}
        rows.append(json.loads(json.dumps(row)))
    said = report.bars(rows, {"matmul": {"tflops": 700.0}})
    assert f"ids: 0.300 of the time of {documents.plain().label}, for 0.250 of its pairs, fwd" in said
    assert f"mask: 1.100 of the time of {masked.plain().label}, for 1.000 of its pairs, fwd {masked.label}" in said
    assert f"bias: 1.500 of the time of {biased.plain().label}, for 1.000 of its pairs, fwd {biased.label}" in said
    assert "4x16" in documents.label
    printed = report.markdown(
        {"rows": rows, "meta": {"matmul": {"tflops": 1, "what": ""}, "command": "", "device": ""}}
    )
    assert "causal mask" in printed
    assert "causal bias" in printed


@pytest.mark.parametrize("data", cases.DATA)
def test_keys_grow_with_their_position(data):
    case = dataclasses.replace(SMALL[1], data=data)
    key = np.asarray(make_inputs(case, 3)["key"])
    plain = np.asarray(make_inputs(dataclasses.replace(case, data="normal"), 3)["key"])
    factor = key / plain
    assert (factor == factor[:1, :, :1, :1]).all() or np.allclose(factor, factor[:1, :, :1, :1], rtol=1e-5)
    first, last = factor[0, 0, 0, 0], factor[0, -1, 0, 0]
    top = cases.GROWTH.get(data, 0.0 if data == "zero" else 1.0)
    low = 1.0 if data in cases.GROWTH else top
    assert (first, last) == pytest.approx((top, low) if data.startswith("falling") else (low, top))


def test_a_run_goes_on_where_it_died(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "on_gpu", lambda: False)  # the device of these tests is a CPU
    path = str(tmp_path / "results.json")
    first = run.Run([JaxNN("xla")], ["fwd"], QUICK, 0, ResultsFile(path, resume=False), patience=300)
    first.time_matmul()
    first.case(SMALL[0], Budget(0, 1))
    with first.trying(SMALL[1], "fwd", "jax_xla"):
        pass  # the file on disk still names this try, as if the process had ended in it
    assert supervise._blame(pathlib.Path(path)) == {"case": SMALL[1].label, "mode": "fwd", "impl": "jax_xla"}

    again = run.Run([JaxNN("xla")], ["fwd"], QUICK, 0, ResultsFile(path, resume=True), patience=300)
    assert again.file.done == [SMALL[0].label]
    assert [row["sq"] for row in again.rows] == [SMALL[0].sq]
    again.case(SMALL[1], Budget(0, 1))
    assert [row["sq"] for row in again.rows] == [SMALL[0].sq]
    assert [x["reason"] for x in again.left_out] == ["ended the process, here or in other cases"]
    assert json.loads(pathlib.Path(path).read_text())["meta"]["trying"] is None


def test_a_process_that_dies_is_started_again(tmp_path):
    """The first process is killed while it tries something; the second is told to go on, and does."""
    script, path = tmp_path / "run.py", tmp_path / "results.json"
    script.write_text(f"""
import json, os, pathlib, signal, sys
path = pathlib.Path({str(path)!r})
meta = {{"trying": None, "fatal": []}}
if "--resume" in sys.argv:
    meta["fatal"] = json.loads(path.read_text())["meta"]["fatal"]
    path.write_text(json.dumps({{"meta": meta, "rows": []}}))
    sys.exit(0)
meta["trying"] = {{"case": "c", "mode": "fwd", "impl": "crash"}}
path.write_text(json.dumps({{"meta": meta, "rows": []}}))
os.kill(os.getpid(), signal.SIGSEGV)
""")
    assert supervise.supervise([sys.executable, str(script), "--json", str(path)], path) == 0
    assert json.loads(path.read_text())["meta"]["fatal"] == [{"case": "c", "mode": "fwd", "impl": "crash"}]


def test_the_results_file_is_found_among_the_arguments():
    assert supervise.results_path(["--suite", "grid", "--json=a/b.json"]) == pathlib.Path("a/b.json")
    assert supervise.results_path(["--json", "c.json", "--resume"]) == pathlib.Path("c.json")
    assert supervise.results_path(["--suite", "grid"]) is None


def test_figure_is_median_and_spread():
    assert Figure.of([2.0, 1.0, 4.0]) == Figure(2.0, 1.5)


def test_budget_shortens_rounds_and_ends():
    assert Budget(0, 3).rounds(5, 1e9) == 5
    budget = Budget(100.0, 10)
    assert budget.rounds(5, 3.0) == 3
    assert budget.rounds(5, 1e3) == 1
    budget.overhead(50.0, 10)
    assert budget.rounds(9, 1.0) == 7
    assert Budget(1e-9, 1).rounds(5, 1.0) == 0


def test_command_line(tmp_path):
    results, picture = tmp_path / "results.json", tmp_path / "picture.png"
    command = f"-m bench --suite small --pass fwd,step --impl jax_flash2,jax_xla,jax_cudnn --json {results}"
    quick = "--rounds 2 --batches 1 --batch_ms 1 --rest 0 --only causal"
    done = subprocess.run(
        [sys.executable, *command.split(), *quick.split(), "--plot", str(picture)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "matmul" in done.stdout
    got = json.loads(results.read_text())
    assert set(got) == {"meta", "rows"}
    if jax.default_backend() != "gpu":
        assert got["meta"]["missing"] == {"jax_cudnn": "needs a CUDA GPU"}
    wrong = [x for x in got["meta"]["left_out"] if x["reason"].startswith("wrong")]
    assert not wrong
    measured = {(row["impl"], row["mode"], row["sq"]) for row in got["rows"]}
    assert {("jax_xla", mode, t) for mode in ("fwd", "step") for t in (96, 130)} <= measured
    fields = {"impl", "dtype", "mode", "d", "dv", "causal", "window", "sq", "sk", "h", "hk", "b", "us", "tflops"}
    assert all(fields <= set(row) and row["us"] > 0 and row["tflops"] > 0 for row in got["rows"])
    assert picture.stat().st_size > 1000


def test_accuracy_tells_right_from_wrong():
    case = cases.Case(b=1, sq=150, h=2, d=24, causal=True, dtype="float32")

    class Raises(JaxImplementation):
        def attention(self, case):
            return lambda q, k, v: 1 / 0

    calls = {x: accuracy.answers(Broken(x), case) for x in (None, "scale", "gradient")}
    found = accuracy.errors(calls | {"raises": accuracy.answers(Raises(), case)}, case, seeds=2)
    assert all(0 < found[None][name] < 1e-6 for name in accuracy.NAMES)
    assert all(1e-3 < found["scale"][name] < 0.1 for name in accuracy.NAMES)
    assert found["gradient"]["out"] < 1e-6 < 1e-3 < found["gradient"]["dk"]
    assert found["raises"] == "ZeroDivisionError: division by zero"
    rows = [{"impl": name, **case.row(), **found[None]} for name in ("jax_flash2", "jax_xla")]
    assert "out: jax_flash2 / jax_xla: mean 1.000, largest 1.000" in accuracy.table(rows, "jax_xla")


def test_step_times(tmp_path):
    results = tmp_path / "steps.json"
    tiny = "--layers 1 --width 32 --heads 2 --lengths 48 --tokens 96 --rounds 2 --round_steps 1 --rest 0"
    command = f"-m bench.steps {tiny} --attentions flash,xla --json {results}"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["attention"]: row for row in json.loads(results.read_text())["rows"]}
    assert set(rows) == {"flash", "xla"}
    assert all(row["ms"] > 0 and row["batch"] * row["sequence"] == 96 for row in rows.values())
    assert rows["flash"]["loss"] == pytest.approx(rows["xla"]["loss"], rel=0.02)
