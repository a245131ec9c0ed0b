"""Copies that bypass the cache, where a probe shows that they are faster on this machine.

Above a threshold glibc's memmove stores without reading the target into the cache first, which can
be 1.6 times as fast for what is far larger than the cache. Some virtual machines report a cache so
large that the threshold is never reached. It can be set by the environment of a process before it
starts, and so for the workers that headrace spawns, never for the process that asks.

Run as a module it prints the speed of copies in this process, in bytes per second.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import time
from typing import Final, NamedTuple

from headrace.engine.host import HostMemory
from headrace.errors import DeviceError

VARIABLE: Final = "GLIBC_TUNABLES"
NON_TEMPORAL: Final = "glibc.cpu.x86_non_temporal_threshold=0x100000"
LEAST_RATIO: Final = 1.1  # below it the difference is noise
PIECE_NBYTES: Final = 8 << 20  # what an owner imports at once where entries decode
PROBED_NBYTES: Final = 128 << 20
_TIMEOUT_S: Final = 60.0
_COPIES: Final = 5


class Tuning(NamedTuple):
    """What the probe found: `ratio` is the speed of tuned copies over plain ones."""

    ratio: float

    @property
    def environment(self) -> dict[str, str]:
        """What to start workers with: empty where tuned copies are not clearly faster."""
        return tuned_environment() if self.ratio >= LEAST_RATIO else {}

    def __str__(self) -> str:
        taken = "used" if self.environment else "not used"
        return f"copies that bypass the cache run at x{self.ratio:.2f} of plain ones: {taken}"


def tuned_environment() -> dict[str, str]:
    """The variable that sets the threshold, with what the user's own holds already."""
    given = os.environ.get(VARIABLE, "")
    return {VARIABLE: f"{given}:{NON_TEMPORAL}" if given else NON_TEMPORAL}


def probe_tuning() -> Tuning:
    """Measure both in processes of their own, plain, tuned, tuned, plain; takes about a second.

    Raises:
        DeviceError: a process of the probe failed.
    """
    plain: list[float] = []
    tuned: list[float] = []
    for kind in (plain, tuned, tuned, plain):
        kind.append(_measured(tuned_environment() if kind is tuned else {}))
    return Tuning(statistics.mean(tuned) / statistics.mean(plain))


def _measured(environment: dict[str, str]) -> float:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headrace.runtime.tuning"],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise DeviceError(f"the speed of copies could not be measured: {exc}") from exc


def copy_speed(nbytes: int = PROBED_NBYTES) -> float:
    """Bytes per second of copies in pieces, the median of a few, the first one dropped."""
    source, target = HostMemory(nbytes), HostMemory(nbytes)
    times = []
    for _ in range(_COPIES + 1):
        begun_ns = time.perf_counter_ns()
        for at in range(0, nbytes, PIECE_NBYTES):
            piece = min(PIECE_NBYTES, nbytes - at)
            ctypes.memmove(target.address + at, source.address + at, piece)
        times.append(time.perf_counter_ns() - begun_ns)
    return nbytes * 1e9 / statistics.median(times[1:])


if __name__ == "__main__":
    print(copy_speed())
