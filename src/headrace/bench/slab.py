"""The slab path against a hot memcpy of the same bytes in the same run.

1-copy: the import of an already written slot (the source wrote it before the clock starts).
2-copy: private memory of the source -> slot -> reservation, two processes, pipelined.
The reference copies the same number of bytes in 4 MiB pieces between two touched buffers, in the
owner's process, just before each transfer. A ratio of 1 is the speed of memcpy. What two such
copies at once take, each of all bytes, bounds the 2-copy form where memory is the limit.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from headrace.backends.null import NullDecoder, decoder_like
from headrace.bench.rows import busy_share
from headrace.engine.host import HostMemory
from headrace.errors import HeadraceError
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle

PIECE_NBYTES = 4 << 20
SPAN_NBYTES = 4 << 20  # of the 2-copy form: what is written must still be in cache when it is read
LAYERS, HEADS, HEAD_DIM, ITEM = 32, 8, 128, 2
POSITION_NBYTES = LAYERS * 2 * HEADS * HEAD_DIM * ITEM


class TransferFailed(HeadraceError):
    """A benchmark's request did not finish; the text is its reason."""


def run(
    sizes_mb: tuple[int, ...], repeats: int, *, chunk_nbytes: int = 8 << 20
) -> Iterator[dict[str, Any]]:
    """Rows of both forms at each size (MiB), interleaved A/B/B/A, the first of each dropped."""
    for size_mb in sizes_mb:
        num_tokens = max(1, (size_mb << 20) // POSITION_NBYTES)
        with _Bench(num_tokens, chunk_nbytes) as bench:
            for repeat in range(repeats + 1):
                forms = ("1-copy", "2-copy") if repeat % 2 else ("2-copy", "1-copy")
                for form in forms:
                    row = bench.measure(form)
                    if repeat:
                        yield {"size_mb": size_mb, "repeat": repeat, "form": form, **row}


class _Bench:
    """An owner with a memory-only decoder and both sources, for prompts of one length."""

    def __init__(self, num_tokens: int, chunk_nbytes: int) -> None:
        self._num_tokens = num_tokens
        geometry = {"layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float16"}
        self._sources = {
            "1-copy": SourceHandle("replay", geometry, num_slots=1),
            "2-copy": SourceHandle(
                "headrace.bench.copying:open", {**geometry, "num_tokens": num_tokens}, num_slots=1
            ),
        }
        self._owners: dict[str, DecoderOwner] = {}
        for form, handle in self._sources.items():
            handle.start()
            decoder = NullDecoder(decoder_like(handle.manifest), context=num_tokens, lanes=1)
            owner = DecoderOwner(decoder, context=num_tokens, chunk_nbytes=chunk_nbytes)
            owner.attach(handle)
            self._owners[form] = owner
        nbytes = num_tokens * POSITION_NBYTES
        self._reference = (HostMemory(nbytes), HostMemory(nbytes))
        self._third, self._fourth = HostMemory(nbytes), HostMemory(nbytes)

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for owner in self._owners.values():
            owner.close()

    def measure(self, form: str) -> dict[str, Any]:
        """One transfer and its reference: wall and CPU ns, and the ratios."""
        busy = busy_share(0.05)
        memcpy_wall_ns, memcpy_cpu_ns = self._memcpy()
        two_wall_ns = self._two_at_once()
        owner, handle = self._owners[form], self._sources[form]
        one_copy = form == "1-copy"
        options = RequestOptions(
            route="whole" if one_copy else "streamed",
            max_tokens=0,
            trace=True,
            chunk=0 if one_copy else SPAN_NBYTES // (POSITION_NBYTES // LAYERS),
        )
        before_ns = time.process_time_ns(), _cpu_ns(handle.pid)
        request = owner.submit([1] * self._num_tokens, options)
        owner.run_until_done(request)
        owner_ns = time.process_time_ns() - before_ns[0]
        source_ns = _cpu_ns(handle.pid) - before_ns[1]
        owner.drain()
        measured = request.measured
        if measured is None:
            raise TransferFailed(request.reason)
        begun_ns = request.imports[0].begun_ns if one_copy else measured.prefill_begun_ns
        wall_ns = measured.published_ns - begun_ns
        cpu_ns = owner_ns + (0 if one_copy else source_ns)
        return {
            "nbytes": measured.kv_nbytes,
            "wall_ns": wall_ns,
            "cpu_ns": cpu_ns,
            "memcpy_wall_ns": memcpy_wall_ns,
            "memcpy_cpu_ns": memcpy_cpu_ns,
            "two_memcpy_wall_ns": two_wall_ns,
            "wall_ratio": memcpy_wall_ns / wall_ns,
            "cpu_ratio": memcpy_cpu_ns / max(cpu_ns, 1),
            "busy_before": round(busy, 3),
            "load_1min": os.getloadavg()[0],
        }

    def _memcpy(self) -> tuple[int, int]:
        source, target = self._reference
        _copy(source, target)  # warms what the last transfer evicted
        begun = time.perf_counter_ns(), time.process_time_ns()
        _copy(source, target)
        return time.perf_counter_ns() - begun[0], time.process_time_ns() - begun[1]

    def _two_at_once(self) -> int:
        source, target = self._reference
        threads = [
            threading.Thread(target=_copy, args=pair)
            for pair in ((source, target), (self._third, self._fourth))
        ]
        begun_ns = time.perf_counter_ns()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter_ns() - begun_ns


def _copy(source: HostMemory, target: HostMemory) -> None:
    for at in range(0, source.nbytes, PIECE_NBYTES):
        nbytes = min(PIECE_NBYTES, source.nbytes - at)
        ctypes.memmove(target.address + at, source.address + at, nbytes)


def _cpu_ns(pid: int) -> int:
    """Time that a process's only busy thread, its first, has run, in ns."""
    with open(f"/proc/{pid}/schedstat") as line:
        return int(line.read().split()[0])
