"""Private memory of an end, the bytes that a transfer carries, and the reference copy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
from collections.abc import Iterator

BLOCK_NBYTES = 1 << 20
PIECE_NBYTES = 4 << 20  # what the reference copies at once
PAGE_NBYTES = 4096

_SHIFT_NBYTES = 4099  # odd, so that a million blocks in a row all begin elsewhere in the noise
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Region:
    """Private memory of `nbytes`, every page of it there before the first transfer."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(mapping)
        self.address = address_of(mapping)
        with contextlib.suppress(OSError):  # no huge pages in this kernel: small ones on both sides
            mapping.madvise(mmap.MADV_HUGEPAGE)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            ctypes.memset(self.address, 0, nbytes)


class Pattern:
    """Bytes that differ from one seed to the next and from one block of 1 MiB to another.

    So bytes of an earlier transfer, bytes in another block's place and bytes that never came are
    all seen.
    """

    def __init__(self, seed: int) -> None:
        noise = random.Random(seed).randbytes(2 * BLOCK_NBYTES)
        self._noise = ctypes.create_string_buffer(noise, len(noise))
        self._address = ctypes.addressof(self._noise)

    def write(self, address: int, offset: int, nbytes: int) -> None:
        """Write bytes [offset, offset + nbytes) of the pattern to `address`."""
        for at, source, take in self._stretches(offset, nbytes):
            ctypes.memmove(address + at, source, take)

    def wrong_nbytes(self, address: int, offset: int, nbytes: int) -> int:
        """Bytes at `address` that lie in pages unlike the pattern's; 0: all of them are right."""
        wrong = 0
        for at, source, take in self._stretches(offset, nbytes):
            if _libc.memcmp(address + at, source, take):
                wrong += _differing_nbytes(address + at, source, take)
        return wrong

    def _stretches(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(place from `offset`, address in the noise, length) of each stretch within a block."""
        at = 0
        while at < nbytes:
            block, within = divmod(offset + at, BLOCK_NBYTES)
            take = min(BLOCK_NBYTES - within, nbytes - at)
            yield at, self._address + block * _SHIFT_NBYTES % BLOCK_NBYTES + within, take
            at += take


def copy_pieces(target: int, source: int, nbytes: int) -> None:
    """Copy in pieces of 4 MiB, as the reference does."""
    for at in range(0, nbytes, PIECE_NBYTES):
        ctypes.memmove(target + at, source + at, min(PIECE_NBYTES, nbytes - at))


def address_of(buffer: mmap.mmap) -> int:
    """The address of the first byte of a writable buffer; the caller keeps the buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def address_of_bytes(held: bytes) -> int:
    """The address of the first of some bytes, to be read while the caller keeps them."""
    return ctypes.cast(ctypes.c_char_p(held), ctypes.c_void_p).value or 0


def _differing_nbytes(address: int, source: int, nbytes: int) -> int:
    differing = 0
    for at in range(0, nbytes, PAGE_NBYTES):
        take = min(PAGE_NBYTES, nbytes - at)
        if _libc.memcmp(address + at, source + at, take):
            differing += take
    return differing
