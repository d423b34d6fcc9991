"""The clock: rest, warm up, batches of back-to-back calls, medians. Knows nothing of what it times.

A power-capped GPU remembers what ran before: without a rest a figure moves by 5 to 15 % with its neighbour. Calls are
enqueued back to back and the device is waited for once a batch, so that a library's dispatch counts only where it is
slower than the device, as in a training loop.
"""

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a figure is taken. Times in seconds."""

    rounds: int = 5
    batches: int = 5
    batch: float = 0.05
    rest: float = 0.2

    def warm_calls(self, call: float) -> int:
        """How many calls warm up: four, fewer where one call is longer than a batch."""
        return max(1, min(4, round(4 * self.batch / call)))

    def cost(self, call: float) -> float:
        """Expected seconds of one measurement of a call that takes `call` seconds."""
        return self.rest + self.warm_calls(call) * call + self.batches * max(call, self.batch)


@dataclasses.dataclass(frozen=True)
class Timer:
    """A call to time. `queued` says that the device keeps a queue, so calls need not be waited for one by one; `within`
    is entered once around calls back to back, for what a user's loop would set once too."""

    call: Callable[[], Any]
    wait: Callable[[Any], None]
    queued: bool
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def run(self, calls: int) -> float:
        """Seconds per call over `calls` calls back to back."""
        with self.within():
            start = time.perf_counter()
            for _ in range(calls):
                result = self.call()
                if not self.queued:
                    self.wait(result)
            self.wait(result)
            return (time.perf_counter() - start) / calls

    def guess(self) -> float:
        """A first estimate of the seconds per call, of a call that has run before."""
        once = self.run(1)
        return once if once > 0.1 else min(once, self.run(5))

    def measure(self, protocol: Protocol, call: float) -> float:
        """One round: the median over batches of seconds per call. `call` is the guess that sizes a batch."""
        start = time.perf_counter()
        gc.collect()
        gc.disable()
        try:
            time.sleep(max(0.0, protocol.rest - (time.perf_counter() - start)))
            self.run(protocol.warm_calls(call))
            calls = max(1, round(protocol.batch / call))
            return statistics.median(self.run(calls) for _ in range(protocol.batches))
        finally:
            gc.enable()


@dataclasses.dataclass(frozen=True)
class Figure:
    """Seconds per call: the median over rounds, and how far apart the rounds were, as a share of it."""

    seconds: float
    spread: float

    @classmethod
    def of(cls, rounds: list[float]) -> "Figure":
        middle = statistics.median(rounds)
        return cls(middle, (max(rounds) - min(rounds)) / middle)


class Budget:
    """Shares a number of seconds out over cells, so that a run ends in time with every cell measured alike."""

    def __init__(self, seconds: float, cells: int):
        self._seconds, self._cells, self._start = seconds, cells, time.perf_counter()
        self._overhead, self._seen = 0.0, 0

    def left(self) -> float:
        return self._seconds - (time.perf_counter() - self._start) if self._seconds else float("inf")

    def overhead(self, seconds: float, cells: int) -> None:
        """Told what preparing (compiling, checking) some cells cost; the next ones are expected to cost as much."""
        self._overhead, self._seen = self._overhead + seconds, self._seen + cells

    def rounds(self, most: int, round_cost: float) -> int:
        """How many rounds the next cell may take, at least one; 0 when nothing is left."""
        left, cells = self.left(), max(self._cells, 1)
        self._cells -= 1
        if left <= 0:
            return 0
        if left == float("inf"):
            return most
        share = left / cells - (self._overhead / self._seen if self._seen else 0)
        return max(1, min(most, int(share / round_cost)))

    def drop(self, cells: int) -> None:
        """Told that some cells will not be measured, so that the others share their time."""
        self._cells -= cells
