"""Runs the bench in a process of its own, and starts it again, without what it was trying, when that process dies.

A rival may crash, hang (the child has a watchdog) or leave the device in an error that no later call survives; none of
them may end a run. Must not import jax: the child needs the device.
"""

import json
import os
import pathlib
import subprocess
import sys

from bench import results_file

CHILD = "JAX_FLASH2_BENCH_CHILD"
RESTARTS = 8


def results_path(arguments: list[str]) -> pathlib.Path | None:
    """What --json names."""
    for at, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in ("--json", "-json"):
            value = value or (arguments[at + 1] if at + 1 < len(arguments) else "")
            return pathlib.Path(value) if value else None
    return None


def _stamp(path: pathlib.Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _blame(path: pathlib.Path) -> dict | None:
    """What the dead process was trying, noted in its file as fatal, if anything."""
    results = json.loads(path.read_text())
    culprit = results["meta"].get("trying")
    if culprit is not None:
        results["meta"]["fatal"].append(culprit)
        results["meta"]["trying"] = None
        results_file.write(path, results["meta"], results["rows"])
    return culprit


def supervise(command: list[str], path: pathlib.Path) -> int:
    """The exit status of the last process."""
    for again in range(RESTARTS + 1):
        before = _stamp(path)
        status = subprocess.call(command, env=os.environ | {CHILD: "1"})
        culprit = _blame(path) if _stamp(path) != before else None
        if culprit is None or again == RESTARTS:
            break
        where = f"{culprit['impl']}, {culprit['mode']} {culprit['case']}"
        print(f"the process ended with status {status} in {where}; going on without it", flush=True)
        if "--resume" not in command:
            command = [*command, "--resume"]
    return status


def main(arguments: list[str]) -> int | None:
    """None in the child, or where there is no results file to go on from: then the caller runs the bench itself."""
    path = results_path(arguments)
    if path is None or CHILD in os.environ or {"--help", "--helpfull", "-h"} & set(arguments):
        return None
    return supervise([sys.executable, "-m", "bench", *arguments], path)
