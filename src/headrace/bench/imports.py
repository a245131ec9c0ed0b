"""Ways to copy a slot into a reservation, against a hot memcpy: which of them an owner should use.

Each way moves the same bytes from a slab to a lane's memory; the reference is memmove in pieces of
4 MiB between two private buffers, just before. All ways are measured in turn, in rotated order, in
a process of their own: once as it is and once with stores that bypass the cache above 1 MiB
(`headrace.runtime.tuning`), since that is set for a whole process before it starts.

    memmove-P       libc's memmove in pieces of P MiB: what the owner does
    numpy-P         the same by numpy's assignment on views of bytes
    two-threads-P   the pieces split between the owner's thread and a spare one
    busy-memmove-P, busy-two-threads-P
                    the same while another process copies memory all the time, as a source does
                    that computes and writes
    window-P        twice, from private memory to a window of P MiB of the slab and on to the lane,
                    as with a ring that the source writes again and again
    cold-lane       the lane's memory was never touched
    cold-mapping    the slab was mapped anew and not pre-faulted
    remap           no copy, but what a source would pay for each request if its slot became the
                    lane: it lets go of the mapping, provably (`/proc`), and maps another one
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, Final

import msgspec

from headrace.bench.rows import busy_share
from headrace.engine.host import HostMemory
from headrace.errors import DeviceError
from headrace.memory import Slab
from headrace.runtime.tuning import tuned_environment

PIECES_MB: Final = (1, 8, 32)
WINDOWS_MB: Final = (1, 4, 16, 64)
REFERENCE_NBYTES: Final = 4 << 20
_BUSY_NBYTES: Final = 64 << 20
_MB: Final = 1 << 20
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14

Way = Callable[[], None]


def run(sizes_mb: tuple[int, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of all ways at each size (MiB), in plain and in tuned processes, plain first and last.

    Raises:
        DeviceError: a process failed.
    """
    for size_mb in sizes_mb:
        for half, tuned in enumerate((False, True, True, False)):
            rounds = (repeats + 1) // 2
            for row in _in_process(size_mb, rounds, tuned=tuned):
                yield {"size_mb": size_mb, "tuned": tuned, "half": half, **row}


def _in_process(size_mb: int, rounds: int, *, tuned: bool) -> list[dict[str, Any]]:
    environment = {**os.environ, **(tuned_environment() if tuned else {})}
    done = subprocess.run(
        [sys.executable, "-m", "headrace.bench.imports", str(size_mb), str(rounds)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise DeviceError(f"a process that measures copies failed with status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=list[dict[str, Any]])


def measure(size_mb: int, rounds: int) -> list[dict[str, Any]]:
    """All ways in this process, the first round dropped."""
    rows = []
    with closing(Slab.create(size_mb * _MB, "headrace-bench")) as slab:
        ways = Ways(slab, size_mb * _MB).all()
        names = list(ways)
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                row = ways[name]()
                if turn:
                    rows.append({"way": name, "round": turn, **row})
    return rows


class Ways:
    """One slab, one lane, the reference's buffers, and what can be done with them."""

    def __init__(self, slab: Slab, nbytes: int) -> None:
        self._slab = slab
        self._nbytes = nbytes
        self.lane = HostMemory(nbytes)
        self._private = HostMemory(nbytes)
        self._other = HostMemory(nbytes)
        ctypes.memset(slab.address, 1, nbytes)
        ctypes.memset(self._private.address, 2, nbytes)

    def all(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Each way by its name; calling one measures it."""
        ways: dict[str, Callable[[], dict[str, Any]]] = {}
        for mb in PIECES_MB:
            ways[f"memmove-{mb}"] = self._timed(partial(self._memmove, mb * _MB))
            ways[f"numpy-{mb}"] = self._timed(partial(self._numpy, mb * _MB))
        ways["two-threads-8"] = self._timed(partial(self._two_threads, 8 * _MB))
        ways["busy-memmove-8"] = self._busy(partial(self._memmove, 8 * _MB))
        ways["busy-two-threads-8"] = self._busy(partial(self._two_threads, 8 * _MB))
        for mb in WINDOWS_MB:
            if mb * _MB <= self._nbytes:
                ways[f"window-{mb}"] = self._timed(partial(self._window, mb * _MB))
        ways["cold-lane"] = self._cold_lane
        ways["cold-mapping"] = self._cold_mapping
        ways["remap"] = self._timed(self._remap)
        return ways

    def _timed(self, way: Way) -> Callable[[], dict[str, Any]]:
        return lambda: self._measured(way)

    def _measured(self, way: Way) -> dict[str, Any]:
        busy = busy_share(0.02)
        self._reference()
        begun_ns = time.perf_counter_ns()
        self._reference()
        reference_ns = time.perf_counter_ns() - begun_ns
        begun_ns = time.perf_counter_ns()
        way()
        wall_ns = time.perf_counter_ns() - begun_ns
        return {
            "wall_ns": wall_ns,
            "memcpy_wall_ns": reference_ns,
            "ratio": reference_ns / wall_ns,
            "busy_before": round(busy, 3),
        }

    def _busy(self, way: Way) -> Callable[[], dict[str, Any]]:
        def measured() -> dict[str, Any]:
            command = [sys.executable, "-m", "headrace.bench.imports", "busy"]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
                if other.stdout is not None:
                    other.stdout.readline()  # it copies from now on
                try:
                    return self._measured(way)
                finally:
                    other.kill()

        return measured

    def _reference(self) -> None:
        self._copy(self._private.address, self._other.address, REFERENCE_NBYTES)

    def _memmove(self, piece: int) -> None:
        self._copy(self._slab.address, self.lane.address, piece)

    def _copy(self, source: int, target: int, piece: int, first: int = 0, step: int = 1) -> None:
        """Copy in pieces, of which every `step`-th from number `first`."""
        for at in range(first * piece, self._nbytes, step * piece):
            ctypes.memmove(target + at, source + at, min(piece, self._nbytes - at))

    def _numpy(self, piece: int) -> None:
        import numpy as np

        source = np.frombuffer(self._slab.view, dtype=np.uint8)
        target = np.frombuffer(self.lane.view, dtype=np.uint8)
        for at in range(0, self._nbytes, piece):
            target[at : at + piece] = source[at : at + piece]

    def _two_threads(self, piece: int) -> None:
        """Pieces by turns; they are fenced when both threads are through."""
        ends = self._slab.address, self.lane.address
        spare = threading.Thread(target=self._copy, args=(*ends, piece, 1, 2))
        spare.start()
        self._copy(*ends, piece, 0, 2)
        spare.join()

    def _window(self, window: int) -> None:
        source, ring, target = self._private.address, self._slab.address, self.lane.address
        for at in range(0, self._nbytes, window):
            count = min(window, self._nbytes - at)
            ctypes.memmove(ring, source + at, count)
            ctypes.memmove(target + at, ring, count)

    def _cold_lane(self) -> dict[str, Any]:
        with closing(mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE)) as fresh:
            address = ctypes.addressof(ctypes.c_char.from_buffer(fresh))
            return self._measured(lambda: self._copy(self._slab.address, address, 8 * _MB))

    def _cold_mapping(self) -> dict[str, Any]:
        with closing(mmap.mmap(self._slab.fd, self._nbytes)) as fresh:
            address = ctypes.addressof(ctypes.c_char.from_buffer(fresh))
            return self._measured(lambda: self._copy(address, self.lane.address, 8 * _MB))

    def _remap(self) -> None:
        with closing(mmap.mmap(self._slab.fd, self._nbytes)) as fresh:
            fresh.madvise(_MADV_POPULATE_WRITE)
        with open("/proc/self/maps") as maps:
            maps.read()


def _stay_busy() -> None:
    """Copy memory until killed, after saying so."""
    source, target = HostMemory(_BUSY_NBYTES), HostMemory(_BUSY_NBYTES)
    print("busy", flush=True)
    while True:
        ctypes.memmove(target.address, source.address, _BUSY_NBYTES)


if __name__ == "__main__":
    if sys.argv[1] == "busy":
        _stay_busy()
    sys.stdout.buffer.write(msgspec.json.encode(measure(int(sys.argv[1]), int(sys.argv[2]))))
