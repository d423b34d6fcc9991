"""The record of the test runs on GPUs, and whether it speaks of the sources in this tree.

    python tests/record.py      says which sources the last recorded run tested; exit status 1 if not these

gpu_runs.json is a list of runs, each written by `pytest --record-gpu-run=tests/gpu_runs.json` itself. One that was cut
short is no proof: it is written down by hand, with the reason under "unfinished".
"""

import datetime
import importlib.util
import json
import pathlib
import sys
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNS = ROOT / "tests" / "gpu_runs.json"


def tree_digest() -> str:
    """The digest of the native sources in this tree, by the function that the build uses."""
    spec = importlib.util.spec_from_file_location("source_digest", ROOT / "cmake" / "source_digest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.source_digest()


def append(path: pathlib.Path, counts: Mapping[str, int]) -> None:
    import jax

    import jax_flash2

    devices = jax.devices("cuda")
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "jax": jax.__version__,
        **counts,
        "source_digest": jax_flash2.capabilities()["cuda"]["source_digest"],
    }
    runs = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*runs, run], indent=2) + "\n")


def main(path: pathlib.Path = RUNS) -> int:
    runs, digest = json.loads(path.read_text()), tree_digest()
    tested = [run for run in runs if run["source_digest"] == digest]
    whole = [run for run in tested if "unfinished" not in run]
    if whole:
        run = whole[-1]
        print(f"These native sources passed {run['passed']} tests on {run['device']} ({run['date']}).")
        return 0
    last = "no run is recorded"
    if runs:
        last = f"the last recorded run ({runs[-1]['date']}, {runs[-1]['device']}) tested others"
    what = f"STALE: these native sources were never tested on a GPU: {last}."
    if tested:
        run = tested[-1]
        what = (
            f"UNFINISHED: these native sources passed {run['passed']} tests on {run['device']} ({run['date']}) and "
            f"failed {run['failed']}, but {run['unfinished']}."
        )
    rule = "*" * 100
    print(f"{rule}\n{what}\nOn a machine with a GPU, run")
    print(f"    pytest --record-gpu-run={path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}\n{rule}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
