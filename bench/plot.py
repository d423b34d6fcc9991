"""Result rows as a picture: bars per implementation over the length.

A panel is a pass, head dim and mask where a suite sweeps lengths, else a pass.

usage: python -m bench.plot RESULTS.json PICTURE.png
"""

import json
import pathlib
import sys

from bench.cases import told_by

PALETTE = {
    "jax_flash2": "#d1495b",
    "jax_xla": "#b8b8b8",
    "jax_cudnn": "#8fb339",
    "torch_fa2": "#2e86ab",
    "torch_cudnn": "#6aa84f",
    "tokamax": "#edae49",
    "dew_fa3": "#30638e",
    "fa4": "#7d5ba6",
}


def _panel(row: dict, sweep: bool) -> str:
    if not sweep:
        return row["mode"]
    return f"{row['mode']}, D = {row['d']}, {'causal' if row['causal'] else 'not causal'}, {row['dtype']}"


def _column(row: dict, sweep: bool) -> str:
    length = f"{row['sq']}" if row["sq"] == row["sk"] else f"{row['sq']}/{row['sk']}"
    if sweep:
        return length
    mask = f"w{row['window']}" if row["window"] is not None else "causal" if row["causal"] else "full"
    data = [row["data"]] if row.get("data", "normal") != "normal" else []
    data += told_by(row.get("told", ""), tuple(row.get("parts", ())), row.get("scored", "")).split()
    return "\n".join([length, mask, f"D{row['d']} H{row['h']}/{row['hk']} B{row['b']}", row["dtype"], *data])


def _sweeps_lengths(rows: list[dict]) -> bool:
    """Whether every panel of a sweep would have three lengths or more, and one case for each."""
    lengths: dict[str, set[str]] = {}
    for row in rows:
        lengths.setdefault(_panel(row, sweep=True), set()).add(_column(row, sweep=True))
    cases = {(_panel(row, sweep=True), _column(row, sweep=False)) for row in rows}
    return min(map(len, lengths.values())) >= 3 and sum(map(len, lengths.values())) == len(cases)


def draw(rows: list[dict], meta: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if not rows:
        return
    sweep = _sweeps_lengths(rows)
    panels: dict[str, list[dict]] = {}
    for row in rows:
        panels.setdefault(_panel(row, sweep), []).append(row)
    names = [name for name in PALETTE if any(row["impl"] == name for row in rows)]
    across = 2 if sweep and len(panels) > 1 else 1
    down = -(-len(panels) // across)
    size = ((7 if sweep else 14) * across, 3.2 * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    top = meta["matmul"]["tflops"]
    unit, scale = ("TFLOP/s", 1.0) if top > 10 else ("GFLOP/s", 1e3)
    for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
        columns = list(dict.fromkeys(_column(row, sweep) for row in panel))
        for at, name in enumerate(names):
            height = {_column(row, sweep): row["tflops"] * scale for row in panel if row["impl"] == name}
            width = 0.8 / len(names)
            x = [c + (at - (len(names) - 1) / 2) * width for c in range(len(columns))]
            axis.bar(x, [height.get(c, 0) for c in columns], width, color=PALETTE[name], label=name)
        axis.axhline(top * scale, color="black", linestyle=":", linewidth=1, label=f"matmul {meta['matmul']['what']}")
        axis.set_xticks(range(len(columns)), columns, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(unit)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=8, ncols=2)
    figure.suptitle(meta.get("device", ""))
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    results = json.loads(pathlib.Path(sys.argv[1]).read_text())
    draw(results["rows"], results["meta"], sys.argv[2])
