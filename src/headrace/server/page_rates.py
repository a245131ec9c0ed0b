"""Rates and medians over a window, of bounded size, told the time by whoever asks."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from headrace.server.page_state import Median

SECOND_NS: Final = 1_000_000_000


class PerSecond:
    """Counts by whole second of the clock, for as many seconds as are kept."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._counts: deque[tuple[int, int]] = deque(maxlen=kept + 1)  # the current one beside them

    def add(self, at_ns: int) -> None:
        """One more; what comes late counts for the latest second."""
        second = at_ns // SECOND_NS
        if self._counts and self._counts[-1][0] >= second:
            latest, count = self._counts.pop()
            self._counts.append((latest, count + 1))
        else:
            self._counts.append((second, 1))

    def history(self, now_ns: int) -> tuple[int, ...]:
        """The counts of the last whole seconds, the latest last."""
        counts = dict(self._counts)
        now = now_ns // SECOND_NS
        return tuple(counts.get(second, 0) for second in range(now - self._kept, now))

    def rate(self, now_ns: int, window: int, since_ns: int) -> float:
        """Per second over the last `window` whole seconds, or over those since `since_ns`."""
        seconds = min(window, now_ns // SECOND_NS - since_ns // SECOND_NS)
        return sum(self.history(now_ns)[-seconds:]) / seconds if seconds > 0 else 0.0


class Window:
    """The latest samples, ns: at most `kept` of them, none older than `window_ns`."""

    def __init__(self, kept: int, window_ns: int) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=kept)
        self._window_ns = window_ns

    def add(self, at_ns: int, value_ns: int) -> None:
        """One more sample."""
        self._samples.append((at_ns, value_ns))

    def median(self, now_ns: int) -> Median:
        """The median and the 99th percentile, by nearest rank."""
        while self._samples and self._samples[0][0] < now_ns - self._window_ns:
            self._samples.popleft()
        values = sorted(value for _, value in self._samples)
        return Median(
            p50_s=_rank(values, 0.5),
            p99_s=_rank(values, 0.99),
            samples=len(values),
            window_s=self._window_ns / SECOND_NS,
        )


def _rank(values: list[int], share: float) -> float | None:
    return values[math.ceil(share * len(values)) - 1] / SECOND_NS if values else None
