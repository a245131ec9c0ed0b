"""The link's own rate, host to device: large copies of each size, and chunks of each size.

Nothing of headrace's path is in it: one buffer, one stream, and the device's own events. It is what
the curve is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from headrace.backends.copy_probe import MIB, probe
from headrace.bench.device.place import Place
from headrace.engine.device import Device, PinFailed, Rows
from headrace.engine.host import HostMemory

PINNED: Final = {True: "pinned", False: "pageable"}


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """Rows of `link`, a plain copy of each size, and of `sweep`, chunk size by chunks in flight."""
    file = place.rows(step)
    device = place.open_device()
    try:
        for pin in (True, False):
            for row in _plain(device, place, pin=pin):
                file.append(row)
            say(f"plain copies, {PINNED[pin]}: done")
        for row in _sweep(device, place):
            file.append(row)
    finally:
        device.close()
    say("chunks: done")


def _plain(device: Device, place: Place, *, pin: bool) -> Iterator[dict[str, Any]]:
    """One copy of each size, the first one of each dropped."""
    sizes = place.sizes
    sizes_gb = [gb for gb in sizes.curve_gb if pin or gb <= sizes.pageable_gb]
    largest = round(max(sizes_gb) * 1e9)
    host = HostMemory(largest, "plain copies")
    target = device.empty(largest)
    device.synchronize()
    registered = False
    if pin:
        with suppress(PinFailed):  # told by each row
            device.register(host.address, largest, read_only=False)
            registered = True
    stream = device.stream("link")
    try:
        for size_gb in sizes_gb:
            nbytes = round(size_gb * 1e9)
            for repeat in range(-1, sizes.link_repeats):
                begun = device.record(stream)
                ends = Rows(target.data_ptr(), nbytes), Rows(host.address, nbytes)
                device.copy(stream, *ends, nbytes, 1)
                ended = device.record(stream)
                ended.wait()
                times = device.times(begun, ended)
                if repeat >= 0:
                    yield {
                        "measure": "link",
                        "slab": PINNED[pin],
                        "registered": registered,
                        "size_gb": size_gb,
                        "repeat": repeat,
                        "nbytes": nbytes,
                        "ns": times.ended_ns - times.begun_ns,
                        "error_ns": times.error_ns,
                    }
    finally:
        device.synchronize()
        if registered:
            device.unregister(host.address)


def _sweep(device: Device, place: Place) -> Iterator[dict[str, Any]]:
    sizes = place.sizes
    chunks = [mib * MIB for mib in sizes.chunks_mib]
    for repeat in range(sizes.sweeps):
        for pin in (True, False) if repeat % 2 == 0 else (False, True):
            total = sizes.sweep_mib * MIB
            found = probe(device, chunks, sizes.depths, total, samples=1, pin=pin)
            for (chunk, depth), rate in found.rates.items():
                yield {
                    "measure": "sweep",
                    "slab": PINNED[pin],
                    "registered": found.pinned,
                    "chunk_mib": chunk // MIB,
                    "in_flight": depth,
                    "repeat": repeat,
                    "nbytes_per_s": rate,
                }
