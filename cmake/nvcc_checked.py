"""Runs one nvcc command, keeps what ptxas said beside the object, and judges it. Knows ptxas's words, no kernel.

A register spill, or a WGMMA pipeline that ptxas serialised, costs tens of percent and no test sees it. So each unit of
the build goes through here: spills above the unit's allowance, the notes C7510, C7511, C7512 and C7514, and a compiler
that needs more than 2 GB fail it (--strict), or warn. Allowances are lines `unit architecture bytes  # why`, unit being
a shell pattern and bytes the spill stores plus loads of the worst function.

    nvcc_checked.py [--strict] ALLOWANCES nvcc ... -o dir/UNIT.cu.o      leaves dir/UNIT.ptxas.log
    nvcc_checked.py --report DIR                                         a table of all logs below DIR
"""

import fnmatch
import pathlib
import re
import resource
import subprocess
import sys

MEMORY_MIB = 2048
SERIALISED = re.compile(r"\((C7510|C7511|C7512|C7514)\)")
ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
COST = re.compile(r"^nvcc: ([\d.]+) s, (\d+) MiB$", re.MULTILINE)


def by_arch(log: str, pattern: re.Pattern[str]) -> dict[str, int]:
    """For each architecture the largest sum of a pattern's numbers on one line."""
    worst: dict[str, int] = {}
    arch = "?"
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            arch = entry[2]
        elif found := pattern.search(line):
            worst[arch] = max(worst.get(arch, 0), sum(map(int, found.groups())))
    return worst


def allowance(table: pathlib.Path, unit: str, arch: str) -> int:
    rows = (line.split("#")[0].split() for line in table.read_text().splitlines())
    return max((int(size) for u, a, size in filter(None, rows) if a == arch and fnmatch.fnmatch(unit, u)), default=0)


def complaints(unit: str, log: str, table: pathlib.Path) -> list[str]:
    found = [f"{unit}: {line.strip()}" for line in log.splitlines() if SERIALISED.search(line)]
    for arch, size in by_arch(log, SPILLS).items():
        if size > (allowed := allowance(table, unit, arch)):
            found.append(f"{unit} for {arch} spills {size} bytes; {allowed} are allowed")
    if (cost := COST.search(log)) and int(cost[2]) > MEMORY_MIB:
        found.append(f"{unit} needs {cost[2]} MiB to compile; {MEMORY_MIB} are allowed")
    return found


def compile_unit(table: pathlib.Path, command: list[str], strict: bool) -> int:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0 or "-o" not in command:
        print(done.stdout, end="")
        return done.returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # ru_maxrss: KiB of the largest process
    log = f"{done.stdout}nvcc: {used.ru_utime + used.ru_stime:.1f} s, {used.ru_maxrss // 1024} MiB\n"

    output = pathlib.Path(command[command.index("-o") + 1])
    unit = output.name.split(".")[0]
    output.with_name(unit + ".ptxas.log").write_text(log)
    found = complaints(unit, log, table)
    for line in [line for line in done.stdout.splitlines() if "warning" in line] + found:
        print(line)
    if found and strict:
        output.unlink()  # so that the next build asks again
        return 1
    return 0


def report(folder: pathlib.Path) -> int:
    logs = {path.name.split(".")[0]: path.read_text() for path in sorted(folder.rglob("*.ptxas.log"))}
    print(f"{'unit':32} {'CPU s':>6} {'MiB':>5}  registers, spilled bytes (of the worst function)")
    seconds = 0.0
    for unit, log in logs.items():
        cost, spills = COST.search(log), by_arch(log, SPILLS)
        assert cost is not None, unit
        seconds += float(cost[1])
        used = ", ".join(f"{arch}: {n}, {spills.get(arch, 0)}" for arch, n in sorted(by_arch(log, REGISTERS).items()))
        print(f"{unit:32} {cost[1]:>6} {cost[2]:>5}  {used}")
    print(f"{len(logs)} units, {seconds:.0f} s of one core in all")
    return 0 if logs else 1


if __name__ == "__main__":
    if sys.argv[1] == "--report":
        sys.exit(report(pathlib.Path(sys.argv[2])))
    strict = sys.argv[1] == "--strict"
    table, *command = sys.argv[2:] if strict else sys.argv[1:]
    sys.exit(compile_unit(pathlib.Path(table), command, strict))
