"""What faults cost and how fast they are over, on real processes, by the host's CLOCK_MONOTONIC.

Deaths and cancels run on one pair with neighbours, digests and books on pairs of their own. With
the sources and the decoder that are built in for this, layers are paced and copies emulated: the
figures are those of the owner and of the kernel, not of a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.bench.faults import cancels, costs, deaths
from headrace.bench.faults.pair import Setting

BOOK_SAMPLES = 500


def run(
    setting: Setting,
    *,
    cycles: int,
    sizes_mb: tuple[int, ...],
    digest_sizes_mb: tuple[int, ...],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """All rows: one for each cycle, and for each request of the digests' cost."""
    yield from deaths.run(setting, sizes_mb, cycles)
    yield from cancels.run(setting, cycles)
    yield from costs.detection(repeats)
    yield from costs.digests(digest_sizes_mb, repeats)
    yield from costs.books(BOOK_SAMPLES)
