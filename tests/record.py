"""The record of the test runs on GPUs, and whether it speaks of the sources in this tree.

    python tests/record.py      says which sources the last recorded run tested; exit status 1 if not these

gpu_runs.json is a list of runs, each written by `pytest --record-gpu-run=tests/gpu_runs.json` itself. A whole run
proves the native sources it ran on once each of its "failures" has passed "again" on the same sources, which a run of
a few tests says after a test was corrected. One that was cut short is no proof: it is written by hand, with the
reason under "unfinished".
"""

import datetime
import importlib.util
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNS = ROOT / "tests" / "gpu_runs.json"
Run = dict[str, Any]


def tree_digest() -> str:
    """The digest of the native sources in this tree, by the function that the build uses."""
    spec = importlib.util.spec_from_file_location("source_digest", ROOT / "cmake" / "source_digest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.source_digest()


def lacking() -> list[str]:
    """What this build has no kernel for, as where JAX_FLASH2_KERNELS is set: of the dtypes that CUDA is said to serve,
    and of the architectures of the devices here, whose work those of sm80 would do unseen."""
    from jax_flash2 import _native

    if _native.cuda is None:
        return list(_native.CUDA_DTYPES)
    built = {name for arch, _, dtype, *_ in _native.cuda.instances() for name in (arch, dtype)}
    dtypes = [name for name, short in _native.CUDA_DTYPES.items() if short not in built]
    return dtypes + sorted({device["arch"] for device in _native.cuda.devices()} - built)


def append(path: pathlib.Path, ended: Mapping[str, Sequence[str]], *, whole: bool) -> None:
    """A run by the tests that passed, failed, ended in an error and were skipped. whole: of all tests there are."""
    import jax

    import jax_flash2

    runs = json.loads(path.read_text()) if path.exists() else []
    digest = jax_flash2.capabilities()["cuda"]["source_digest"]
    failures = sorted({*ended["failed"], *ended["error"]})
    again = sorted(set(ended["passed"]) & _open_failures(_of(runs, digest)))
    devices = jax.devices("cuda")
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "jax": jax.__version__,
        "passed": len(ended["passed"]),
        "failed": len(failures),
        "skipped": len(ended["skipped"]),
        **({"failures": failures} if failures else {}),
        **({} if whole else {"again": again}),
        "source_digest": digest,
    }
    path.write_text(json.dumps([*runs, run], indent=2) + "\n")


def _of(runs: Sequence[Run], digest: str) -> list[Run]:
    return [run for run in runs if run["source_digest"] == digest]


def _is_whole(run: Run) -> bool:
    return "unfinished" not in run and "again" not in run


def _open_failures(tested: Sequence[Run]) -> set[str]:
    """Of the last whole run of one digest, what has not passed since."""
    open_failures: set[str] = set()
    for run in tested:
        open_failures = (set() if _is_whole(run) else open_failures - {*run.get("again", ())}) | {
            *run.get("failures", ())
        }
    return open_failures


def main(path: pathlib.Path = RUNS) -> int:
    runs = json.loads(path.read_text())
    tested = _of(runs, tree_digest())
    whole = [run for run in tested if _is_whole(run)]
    failures = _open_failures(tested)
    if whole and not failures:
        run = whole[-1]
        again = f", and {run['failed']} when run again" if run["failed"] else ""
        print(f"These native sources passed {run['passed']} tests on {run['device']} ({run['date']}){again}.")
        return 0
    last = "no run is recorded"
    if runs:
        last = f"the last recorded run ({runs[-1]['date']}, {runs[-1]['device']}) tested others"
    what = f"STALE: these native sources were never tested on a GPU: {last}."
    if whole:
        what = f"FAILED: on these native sources {', '.join(sorted(failures))} failed on {whole[-1]['device']}."
    elif tested:
        run = tested[-1]
        what = (
            f"UNFINISHED: these native sources passed {run['passed']} tests on {run['device']} ({run['date']}) and "
            f"failed {run['failed']}, but {run.get('unfinished', 'they were not all tests')}."
        )
    rule = "*" * 100
    print(f"{rule}\n{what}\nOn a machine with a GPU, run")
    print(f"    pytest --record-gpu-run={path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}\n{rule}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
