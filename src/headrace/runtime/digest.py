"""The digest of a span's bytes, in plan order: layer by layer, part by part, row by row."""

from __future__ import annotations

import zlib
from collections.abc import Iterable


def crc32(rows: Iterable[memoryview | bytes]) -> int:
    """zlib.crc32 over all rows, as one number of 32 bits."""
    value = 0
    for row in rows:
        value = zlib.crc32(row, value)
    return value
