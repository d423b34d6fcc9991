"""The file of a run: written whenever something was measured or is about to be tried, so that no end of the process
costs what came before it, and a run that is started again goes on where it died. Knows no implementation and no clock.
"""

import json
import os
import pathlib
from typing import Any

REPEATS = 2  # an implementation that ended the process this often in a pass is not tried in it again


def write(path: pathlib.Path, meta: dict[str, Any], rows: list[dict]) -> None:
    """{"meta", "rows"}, a row a line, and never half a file."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


class ResultsFile:
    """{"meta", "rows"} on disk. In meta, `trying` is what the process is at, `fatal` what ended one (supervise.py)."""

    def __init__(self, path: str | None, resume: bool):
        self._path = pathlib.Path(path) if path else None
        self.rows: list[dict] = []
        self.left_out: list[dict] = []
        self.done: list[str] = []  # labels of cases
        self.fatal: list[dict] = []
        self.elapsed = 0.0
        self._trying: dict | None = None
        if resume and self._path is not None and self._path.exists():
            self._load(json.loads(self._path.read_text()))

    def _load(self, results: dict) -> None:
        meta = results["meta"]
        self.done, self.fatal, self.elapsed = meta["done"], meta["fatal"], meta["elapsed"]
        self.left_out = [x for x in meta["left_out"] if x["case"] in self.done]
        self.rows = [row for row in results["rows"] if row["case"] in self.done]

    def is_fatal(self, case: str, mode: str, impl: str) -> bool:
        """Whether trying this has ended a process, or has done so in enough other cases."""
        here = [x for x in self.fatal if (x["mode"], x["impl"]) == (mode, impl)]
        return len(here) >= REPEATS or any(x["case"] == case for x in here)

    def trying(self, meta: dict, case: str, mode: str, impl: str) -> None:
        self._trying = {"case": case, "mode": mode, "impl": impl}
        self.write(meta)

    def idle(self) -> None:
        self._trying = None

    def write(self, meta: dict[str, Any]) -> None:
        if self._path is None:
            return
        state = {"left_out": self.left_out, "done": self.done, "fatal": self.fatal, "trying": self._trying}
        write(self._path, meta | state, self.rows)
