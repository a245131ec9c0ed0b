"""The one lane: prompts come into its mirrors by rows, and go to the card by blocks.

A block is flushed when every row that the prompt has in it is there, and again after each later
write into it. Until then its rows wait in the mirror, where no decode can see them. So no import
leaves anything in flight, a prompt that is given up costs nothing, and `check_flushed` tells
whether all of one is on the card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from headrace.engine.atom.blocks import Rows, lane_blocks, needed, rows_of, window_start
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.casts import Cast
from headrace.engine.atom.compiled import CompiledDecoder
from headrace.engine.atom.mirrors import Mirror, make_mirror, require_mirrors
from headrace.engine.atom.record import Verified
from headrace.engine.atom.sdk import VENDOR, Sdk
from headrace.errors import BackendUnavailable, DeviceError, LocalProtocolError

WARM_UP_TOKENS: Final = (0,)


@dataclass
class _Block:
    """A block of the prompt that is being imported.

    wanted: rows that the prompt has in it, from row 0 on. there: which rows were written. flushed:
    whether the card has all of them as they are now.
    """

    wanted: int
    there: np.ndarray
    flushed: bool = False


@dataclass
class _Mirrored:
    """A cache, its mirror, and how far each block of the mirror holds other than zeros."""

    cache: Cache
    cast: Cast
    mirror: Mirror
    soiled: list[int]
    blocks: dict[int, _Block] = field(default_factory=dict)


class AtomLane:
    """Lane 0 of a compiled decoder. Every method is called from its thread."""

    def __init__(
        self,
        sdk: Sdk,
        compiled: CompiledDecoder,
        verified: Verified,
        sent: str,
        *,
        reads_back: bool = False,
    ) -> None:
        """`sent`: the dtype of the cells that come. `reads_back`: compare each flushed block.

        Raises:
            Refused: a cache's dtype is not supported, or the host has too little memory.
            BackendUnavailable: the card does not hold what is written to it.
            DeviceError: it failed.
        """
        self._sdk = sdk
        self._compiled = compiled
        self._verified = verified
        self._reads_back = reads_back
        casts = [Cast(sent, cache.dtype, verified.number_format) for cache in compiled.caches]
        require_mirrors(compiled.caches, [cast.stored_dtype for cast in casts])
        self._caches = [
            _Mirrored(cache, cast, make_mirror(sdk, cache, cast.stored_dtype), [0] * cache.blocks)
            for cache, cast in zip(compiled.caches, casts, strict=True)
        ]
        self._scratch: dict[tuple[object, ...], Mirror] = {}
        self._num_tokens = 0
        self.counts = dict.fromkeys(
            ("flushes", "flushed_nbytes", "fetches", "clears", "values_changed"), 0
        )
        if verified.warms_up:
            compiled.prefill(WARM_UP_TOKENS)
        self._mark()
        self._check_health()
        self._clear()  # what lies in a card's memory at first may be no number
        self._check_health()

    @property
    def casts(self) -> list[Cast]:
        """Of each cache."""
        return [each.cast for each in self._caches]

    def begin(self, num_tokens: int) -> None:
        """A prompt of `num_tokens` is going to come; nothing of it is there.

        Raises:
            DeviceError: the lane had to be cleared, and that failed.
        """
        self._num_tokens = num_tokens
        self.forget()
        if self._verified.clears:
            self._clear()

    def forget(self) -> None:
        """Nothing of the prompt is there any more: all of it is going to come again."""
        for each in self._caches:
            each.blocks = {
                rows.block: _Block(rows.num, np.zeros(rows.num, bool))
                for rows in needed(each.cache, self._num_tokens)
            }

    def end(self) -> None:
        """Nothing more comes of this prompt."""
        self._num_tokens = 0
        for each in self._caches:
            each.blocks = {}

    def check_rows(self, layer: int, part: int, start: int, stop: int) -> None:
        """Raises: LocalProtocolError: the prompt has no rows for positions [start, stop)."""
        for _ in rows_of(self._of(layer, part).cache, start, stop, self._num_tokens):
            pass

    def slid(self, layer: int, length: int) -> bool:
        """Whether a layer's rows have moved, once the sequence is of `length` positions."""
        return window_start(self._of(layer, 0).cache, length) > 0

    def write(self, layer: int, part: int, start: int, cells: torch.Tensor) -> None:
        """Take in `cells` [heads, positions from `start`, head_dim], and flush what is complete.

        Raises:
            LocalProtocolError: the prompt has no rows for them.
            DeviceError: a flush failed, or the card does not hold what was flushed.
        """
        each = self._of(layer, part)
        stop = start + cells.shape[1]
        touched = list(rows_of(each.cache, start, stop, self._num_tokens))
        for rows in touched:
            block = each.blocks[rows.block]
            block.flushed = False
            last = rows.first + rows.num
            target = each.mirror.rows[rows.block, :, rows.first : last]
            at = rows.start - start
            self.counts["values_changed"] += each.cast.store(target, cells[:, at : at + rows.num])
            each.soiled[rows.block] = max(each.soiled[rows.block], last)
            block.there[rows.first : last] = True
            if block.there.all():
                self._flush(each, rows.block, block)

    def read(self, layer: int, part: int, start: int, stop: int) -> torch.Tensor:
        """What the card holds of positions [start, stop), [heads, positions, head_dim].

        Rows that wait for others of their block are flushed before, with zeros in place of those.

        Raises:
            LocalProtocolError: the prompt has no such rows, or they never came.
            DeviceError: a transfer failed.
        """
        each = self._of(layer, part)
        found = []
        for rows in rows_of(each.cache, start, stop, self._num_tokens):
            block = each.blocks[rows.block]
            last = rows.first + rows.num
            if not block.there[rows.first : last].all():
                raise LocalProtocolError(f"rows [{rows.first}, {last}) of {_name(each, rows)}")
            if not block.flushed:
                each.mirror.rows[rows.block, :, np.flatnonzero(~block.there)] = 0
                self._flush(each, rows.block, block)
            scratch = self._fetched(each, rows.block, block.wanted)
            found.append(each.cast.load(scratch[:, rows.first : last]))
        return torch.cat(found, dim=1)

    def check_flushed(self) -> None:
        """Raises: LocalProtocolError: a row of the prompt is not on the card."""
        for each in self._caches:
            for number, block in each.blocks.items():
                if not block.flushed:
                    raise LocalProtocolError(
                        f"block {number} of {each.cache.name} has {int(block.there.sum())} of "
                        f"{block.wanted} rows, and was not flushed since"
                    )

    def close(self) -> None:
        """Let go of all memory."""
        self._caches = []
        self._scratch = {}

    def _mark(self) -> None:
        """Write other numbers than zeros into a block of the first and of the last cache."""
        for each in (self._caches[0], self._caches[-1]):
            cells = torch.arange(1.0, 1.0 + each.cache.heads).view(-1, 1, 1)
            cells = cells.expand(-1, each.cache.rows, each.cache.head_dim).to(each.cast.sent_dtype)
            each.cast.store(each.mirror.rows[0], cells)
            each.soiled[0] = each.cache.rows
            self._compiled.update(each.cache, each.mirror, 0, each.cache.rows)

    def _check_health(self) -> None:
        """See that the first and the last cache hold what was written last.

        After a process ended abruptly a card may answer every call and do nothing. It may still
        hold the marks of that process, or its zeros, but not both in turn.
        """
        for each in (self._caches[0], self._caches[-1]):
            landed = self._fetched(each, 0, each.cache.rows)
            if not torch.equal(_bits(landed), _bits(each.mirror.rows[0])):
                raise BackendUnavailable(
                    VENDOR,
                    "layout_unverified",
                    f"a round trip of {each.cache.name}",
                    "a block that was written came back otherwise",
                    "The card may be stale since a process ended abruptly: restart its driver or "
                    "the host, then run headrace atom probe",
                )

    def _of(self, layer: int, part: int) -> _Mirrored:
        return self._caches[2 * layer + part]

    def _flush(self, each: _Mirrored, number: int, block: _Block) -> None:
        self._zero_behind(each, number, block.wanted)
        rows = block.wanted if self._verified.sub_blocks else each.cache.rows
        self._compiled.update(each.cache, each.mirror, number, rows)
        self._count_flush(each, rows)
        if self._reads_back:
            landed = self._fetched(each, number, block.wanted)[:, : block.wanted]
            sent = each.mirror.rows[number, :, : block.wanted]
            if not torch.equal(_bits(landed), _bits(sent)):
                raise DeviceError(
                    f"block {number} of {each.cache.name} does not hold what was flushed"
                )
        block.flushed = bool(block.there.all())

    def _zero_behind(self, each: _Mirrored, number: int, wanted: int) -> None:
        """What an earlier prompt left behind this one's last row is not for the card."""
        if each.soiled[number] > wanted:
            each.mirror.rows[number, :, wanted : each.soiled[number]] = 0
        each.soiled[number] = wanted

    def _fetched(self, each: _Mirrored, number: int, wanted: int) -> torch.Tensor:
        """A block as the card has it, [heads, rows, head_dim], until the next one is fetched."""
        key = (each.cache.shape, each.cast.stored_dtype)
        if key not in self._scratch:
            self._scratch[key] = make_mirror(self._sdk, each.cache, each.cast.stored_dtype)
        scratch = self._scratch[key]
        rows = wanted if self._verified.sub_blocks else each.cache.rows
        self._compiled.fetch(each.cache, scratch, number, rows)
        self.counts["fetches"] += 1
        return scratch.rows[number]

    def _clear(self) -> None:
        """Put zeros into every block of the lane."""
        for each in self._caches:
            for number in lane_blocks(each.cache, self._compiled.positions):
                self._zero_behind(each, number, 0)
                self._compiled.update(each.cache, each.mirror, number, each.cache.rows)
                self._count_flush(each, each.cache.rows)
        self.counts["clears"] += 1

    def _count_flush(self, each: _Mirrored, rows: int) -> None:
        cache = each.cache
        self.counts["flushes"] += 1
        row_nbytes = cache.heads * cache.head_dim * each.cast.stored_dtype.itemsize
        self.counts["flushed_nbytes"] += rows * row_nbytes


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _name(each: _Mirrored, rows: Rows) -> str:
    return f"block {rows.block} of {each.cache.name} never came"


def same_for_all(casts: Sequence[Cast]) -> str:
    """The casts of all caches in words, each once."""
    return "; ".join(sorted({cast.name for cast in casts}))
