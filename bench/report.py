"""Result rows as text: lines, geometric means, what was left out, tables for the documentation. Knows rows only.

usage: python -m bench.report RESULTS.json        prints the tables in Markdown
"""

import json
import math
import pathlib
import sys
from collections import Counter
from collections.abc import Iterable

from bench.cases import Case, told_by

OURS = "jax_flash2"
KEYS = ("mode", "d", "dv", "dtype", "causal", "window", "sq", "sk", "h", "hk", "b", "data", "parts", "told", "scored")
_PLAIN = {"data": "normal", "parts": (), "told": "", "scored": ""}  # of rows that were written before these fields were
LOW = 0.95  # a cell whose ratio to its best rival is below this is named


def with_ratios(cell: list[dict]) -> list[dict]:
    """Adds to our row how many times faster it is than the best rival of the cell; None without a rival."""
    rivals = [row["us"] for row in cell if row["impl"] != OURS]
    for row in cell:
        if row["impl"] == OURS:
            row["ratio_to_best_rival"] = min(rivals) / row["us"] if rivals else None
    return cell


def line(case: Case, mode: str, cell: list[dict]) -> str:
    unit = 1e3 if max(row["tflops"] for row in cell) < 1 else 1
    rate = "GFLOP/s" if unit == 1e3 else "TFLOP/s"
    parts = [
        f"{x['impl']} {x['us']:.1f} us {x['tflops'] * unit:.0f} {rate} {x['of_matmul']:.0%} +-{x['spread'] / 2:.1%}"
        for x in cell
    ]
    ratio = [row.get("ratio_to_best_rival") for row in cell if row["impl"] == OURS]
    best = f" | {ratio[0]:.2f}x best rival" if ratio and ratio[0] else ""
    return f"{mode:4s} {case.label}: " + " | ".join(parts) + best


def _cells(rows: Iterable[dict]) -> dict[tuple, dict[str, float]]:
    """{cell: {implementation: us}}"""
    cells: dict[tuple, dict[str, float]] = {}
    for row in rows:
        cells.setdefault(_key(row), {})[row["impl"]] = row["us"]
    return cells


def _key(row: dict) -> tuple:
    values = ((_PLAIN | row)[x] for x in KEYS)
    return tuple(tuple(x) if isinstance(x, list) else x for x in values)


def _where(key: tuple) -> str:
    _, d, dv, dtype, causal, window, sq, sk, h, hk, b, data, parts, how, scored = key
    mask = ("causal" if causal else "full") + (f" w{window}" if window is not None else "")
    width, length = f"d{d}" + (f"/{dv}" if dv != d else ""), f"t{sq}" + (f"/{sk}" if sk != sq else "")
    data = "" if data == "normal" else f" {data}"
    return f"{dtype} {width} {mask} {length} h{h}/{hk} b{b}{data}{told_by(how, parts, scored)}"


def geometric_means(rows: list[dict]) -> list[dict]:
    """Rival's time over ours, by pass and head dim: {mode, d (None: all), rival, cells, mean, worst, at}."""
    cells = {key: times for key, times in _cells(rows).items() if OURS in times and len(times) > 1}
    found = []
    for mode in dict.fromkeys(key[0] for key in cells):
        counts = Counter(key[1] for key in cells if key[0] == mode)
        dims = sorted(d for d, n in counts.items() if 1 < n < counts.total())
        for d in [*dims, None]:
            group = {key: times for key, times in cells.items() if key[0] == mode and d in (None, key[1])}
            names = dict.fromkeys(name for times in group.values() for name in times if name != OURS)
            for rival in [*names, *(["best"] if len(names) > 1 else [])]:
                ratios = {}
                for key, times in group.items():
                    others = [us for name, us in times.items() if name != OURS and rival in (name, "best")]
                    if others:
                        ratios[key] = min(others) / times[OURS]
                at = min(ratios, key=lambda key: ratios[key])
                mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
                found.append({"mode": mode, "d": d, "rival": rival, "cells": len(ratios), "mean": mean})
                found[-1] |= {"worst": ratios[at], "at": at}
    return found


def summary(rows: list[dict]) -> str:
    means = geometric_means(rows)
    if not means:
        return f"no cell has both {OURS} and a rival"
    lines = [f"rival's time / {OURS}'s (above 1: {OURS} is faster)", "pass d     rival        cells  mean  worst"]
    for x in means:
        what = f"{x['mode']:4s} {x['d'] or 'all'!s:5s} {x['rival']:12s}"
        lines.append(f"{what} {x['cells']:5d} {x['mean']:5.2f} {x['worst']:6.2f} at {_where(x['at'])}")
    return "\n".join(lines)


def best_rivals(rows: list[dict]) -> dict[tuple, tuple[str, float]]:
    """{cell: (its best rival, that rival's time over ours)}"""
    found = {}
    for key, times in _cells(rows).items():
        rivals = {name: us for name, us in times.items() if name != OURS}
        if OURS in times and rivals:
            best = min(rivals, key=lambda name: rivals[name])
            found[key] = best, rivals[best] / times[OURS]
    return found


def bars(rows: list[dict], meta: dict) -> str:
    """What is promised of the kernels, read off these rows: against the best rival of each cell, against the matrix
    product, at lengths that are no multiple of a tile, on inputs that are hard for a softmax, and of packed sequences,
    documents, masks and what acts on scores against the plain call that each is measured by."""
    lines, best = [], best_rivals(rows)
    for mode in dict.fromkeys(key[0] for key in best):
        ratios = {key: x for key, x in best.items() if key[0] == mode}
        mean = math.exp(sum(math.log(ratio) for _, ratio in ratios.values()) / len(ratios))
        worst = min(ratios, key=lambda key: ratios[key][1])
        low = {key: x for key, x in ratios.items() if x[1] < LOW}
        lines.append(
            f"{mode}: best rival / {OURS}: geometric mean {mean:.3f}, lowest {ratios[worst][1]:.3f}, "
            f"{len(ratios)} cells, {len(low)} below {LOW}"
        )
        lines += [
            f"  {ratio:.3f} ({name}) {_where(key)}" for key, (name, ratio) in sorted(low.items(), key=lambda x: x[1][1])
        ]
    ours = {_key(row): row for row in rows if row["impl"] == OURS}
    for key, row in ours.items():
        if row["mode"] == "fwd" and row["d"] == row["dv"] == 128 and not row["causal"] and row["sq"] >= 8192:
            product = meta["matmul"]["tflops"]
            lines.append(f"matmul: {row['tflops']:.0f} of {product:.0f} TFLOP/s, {row['of_matmul']:.3f} {_where(key)}")
        even = ours.get(_key(row | {"sq": 1024, "sk": 1024})) if row["sq"] == row["sk"] == 1000 else None
        if even:
            ratio = row["tflops"] / even["tflops"]
            lines.append(f"lengths: T = 1000 at {ratio:.3f} of T = 1024 per FLOP, {row['mode']} {_where(key)}")
        plain = ours.get(_key(row | {"data": "normal"})) if row.get("data", "normal") != "normal" else None
        if plain:
            ratio = plain["us"] / row["us"]
            lines.append(f"data: {ratio:.3f} of the speed on normal inputs, {row['mode']} {_where(key)}")
        if row.get("told") or row.get("scored"):
            case = Case(**{x: value for x, value in zip(KEYS, key, strict=True) if x != "mode"})
            plain = ours.get(_key({"mode": row["mode"], **case.plain().row()}))
            if plain:
                pairs = case.b * case.kept() / (case.plain().b * case.plain().kept())
                lines.append(
                    f"{case.told or case.scored}: {row['us'] / plain['us']:.3f} of the time of {case.plain().label}, "
                    f"for {pairs:.3f} of its pairs, {row['mode']} {_where(key)}"
                )
    return "\n".join(lines or ["no cell that a promise speaks of"])


def markdown(results: dict) -> str:
    """The geometric means and every cell of a results file, as two Markdown tables."""
    rows, matmul = results["rows"], results["meta"]["matmul"]
    unit, scale = ("TFLOP/s", 1.0) if matmul["tflops"] > 10 else ("GFLOP/s", 1e3)
    lines = [f"`{results['meta']['command']}`: {results['meta']['device']}, matmul {matmul['what']}"]
    lines[0] += f" {matmul['tflops'] * scale:.0f} {unit}"
    means = geometric_means(rows)
    if means:
        lines += [
            "",
            "| pass | D | against | cells | geometric mean | worst cell |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
    for x in means:
        head = f"| {x['mode']} | {x['d'] or 'all'} | {x['rival']} | {x['cells']} |"
        lines.append(f"{head} {x['mean']:.2f}x | {x['worst']:.2f}x |")
    best = best_rivals(rows)
    names = list(dict.fromkeys(row["impl"] for row in rows))
    lines += ["", f"{unit}, and in brackets the share of the matmul rate:", ""]
    lines += [
        "| pass | dtype | D | mask | T | heads | B | " + " | ".join(names) + " | ratio to the best |",
        "| --- " * (8 + len(names)) + "|",
    ]
    cells: dict[tuple, dict[str, str]] = {}
    for row in rows:
        mask = ("causal" if row["causal"] else "full") + (f", window {row['window']}" if row["window"] else "")
        length = f"{row['sq']}" if row["sq"] == row["sk"] else f"{row['sq']} / {row['sk']}"
        mask += "" if row.get("data", "normal") == "normal" else f", {row['data']}"
        mask += told_by(row.get("told", ""), tuple(row.get("parts", ())), row.get("scored", ""))
        width = row["d"] if row["d"] == row["dv"] else f"{row['d']} / {row['dv']}"
        key = (row["mode"], row["dtype"], width, mask, length, f"{row['h']} / {row['hk']}", row["b"])
        cell = cells.setdefault(key, {})
        cell[row["impl"]] = f"{row['tflops'] * scale:.0f} ({row['of_matmul']:.0%})"
        if _key(row) in best:
            cell["ratio"] = "{1:.2f} ({0})".format(*best[_key(row)])
    for key, cell in cells.items():
        figures = " | ".join(cell.get(name, "-") for name in [*names, "ratio"])
        lines.append(f"| {' | '.join(map(str, key))} | {figures} |")
    return "\n".join(lines)


def left_out(items: list[dict]) -> str:
    """One line per implementation and reason, with how many cells it cost."""
    counts = Counter((x["impl"], x["reason"]) for x in items)
    lines = [f"left out {name:12s} {n:3d} cells: {reason}" for (name, reason), n in counts.items()]
    return "\n".join(lines or ["left out nothing"])


if __name__ == "__main__":
    results = json.loads(pathlib.Path(sys.argv[1]).read_text())
    print(bars(results["rows"], results["meta"]) + "\n")
    print(markdown(results))
