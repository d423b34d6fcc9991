"""Runs one nvcc command, keeps what ptxas said beside the object, and judges it. Knows ptxas's words, nothing of kernels.

A register spill, or a WGMMA pipeline that ptxas serialised, costs tens of percent and no test sees it. So each unit of
the build goes through here: spills above the unit's allowance and the notes C7510, C7512 and C7514 fail it (--strict), or
warn. The allowances are lines `unit architecture bytes  # why`, bytes being spill stores plus loads.

    nvcc_checked.py [--strict] ALLOWANCES nvcc ... -o dir/UNIT.cu.o
"""

import pathlib
import re
import subprocess
import sys

SERIALISED = re.compile(r".*\((C7510|C7512|C7514)\).*")
ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '([^']+)' for '([^']+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def allowances(path: pathlib.Path) -> dict[tuple[str, str], int]:
    rows = (line.split("#")[0].split() for line in path.read_text().splitlines())
    return {(unit, arch): int(size) for unit, arch, size in filter(None, rows)}


def worst_spills(log: str) -> dict[str, int]:
    """The largest spill of any entry function or device function, by architecture."""
    worst: dict[str, int] = {}
    arch = "?"
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            arch = entry[2]
        elif spills := SPILLS.search(line):
            worst[arch] = max(worst.get(arch, 0), int(spills[1]) + int(spills[2]))
    return worst


def complaints(unit: str, log: str, allowed: dict[tuple[str, str], int]) -> list[str]:
    found = [line for line in log.splitlines() if SERIALISED.match(line)]
    for arch, size in worst_spills(log).items():
        if size > allowed.get((unit, arch), 0):
            found.append(f"{unit} for {arch} spills {size} bytes; {allowed.get((unit, arch), 0)} are allowed")
    return found


def main(argv: list[str]) -> int:
    strict = argv[0] == "--strict"
    table, *command = argv[1:] if strict else argv
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "-o" not in command or done.returncode != 0:
        print(done.stdout, end="")
        return done.returncode
    output = pathlib.Path(command[command.index("-o") + 1])
    unit = output.name.split(".")[0]
    output.with_name(unit + ".ptxas.log").write_text(done.stdout)
    said = [line for line in done.stdout.splitlines() if "warning" in line]
    found = complaints(unit, done.stdout, allowances(pathlib.Path(table)))
    for line in said + [("error: " if strict else "warning: ") + line for line in found]:
        print(line)
    if found and strict:
        output.unlink(missing_ok=True)  # so that the next build asks again
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
