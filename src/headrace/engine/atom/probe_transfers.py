"""The steps of a probe that move blocks: which calls there are, what comes back, what it costs."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from headrace.engine.atom import prompts
from headrace.engine.atom.blocks import LANE, lane_blocks
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.compiled import CALLS, SIZE_CALL
from headrace.engine.atom.number_format import MANTISSA_BITS, decode, encode
from headrace.engine.atom.probe_bench import (
    Bench,
    Place,
    bits_of,
    by_geometry,
    label,
    pattern,
    starts,
)
from headrace.engine.records import Facts
from headrace.engine.tensors import DTYPES
from headrace.errors import DeviceError

ALL_CALLS: Final = (*CALLS, SIZE_CALL, "_copy_kv_cache")
REPEATS: Final = 5
ALIGNMENT_NBYTES: Final = 2 << 20
"""By how many bytes a cache may be larger on a card than its mirror."""

_EXPONENT: Final = 63
_BEFORE_A_STEP: Final = 6
_LEFT: Final = 23130  # what a mirror holds where nothing was fetched into it


def calls(bench: Bench) -> Facts:
    """Which of the private calls the runtime has."""
    runtime = bench.load()
    return {name: callable(getattr(runtime, name, None)) for name in ALL_CALLS}


def sizes(bench: Bench) -> Facts:
    """How large the runtime says that caches are, which tells how wide their elements are.

    Where it does not say, a mirror is taken to be of the declared dtype. agrees: whether each cache
    has the bytes of its mirror, and at most `ALIGNMENT_NBYTES` more.
    """
    compiled = bench.opened
    if not compiled.has_sizes():
        return {"told": False}
    facts: Facts = {"told": True, "agrees": True}
    for cache in compiled.caches:
        told = compiled.nbytes_of(cache)
        facts.setdefault(label(cache), told)
        if _fits(told, cache.elements * DTYPES[cache.dtype].itemsize):
            continue
        if _fits(told, cache.elements * torch.int16.itemsize):
            bench.stored[cache.name] = torch.int16
        else:
            facts["agrees"] = False
            facts.setdefault("first", f"{told} bytes of {cache.name}, {label(cache)}")
    return facts


def _fits(told: int, wanted: int) -> bool:
    return wanted <= told <= wanted + ALIGNMENT_NBYTES


def warm_up(bench: Bench) -> Facts:
    """Whether a block comes back before the card has computed, or only after that.

    needed: None if it never does.
    """
    before = _lost(bench)
    if not before:
        return {"needed": False}
    bench.opened.prefill(bench.first(bench.short))
    after = _lost(bench)
    return {"needed": None if after else True, "before": before, "after": after}


def round_trip(bench: Bench) -> Facts:
    """Whether each block of the lane, of each cache by its name, keeps any bits that are sent.

    All are sent before the first is fetched, and no two alike. `finite_changed`: elements that are
    numbers in a format, and came back as others. `converted`: some did, and as the runtime's own
    16-bit float would have it.
    """
    places = list(bench.places())
    begins = list(starts(bench.count(place.cache) for place in places))
    for place, begin in zip(places, begins, strict=True):
        bench.send(place, pattern(begin, bench.count(place.cache)))
    seen = _Seen()
    kept: dict[Place, int] = {}
    for place, begin in zip(places, begins, strict=True):
        want = pattern(begin, bench.count(place.cache))
        got = bench.fetch(place, before=~want)
        seen.add(place, want, got, bench.mirror(place.cache).rows.element_size())
        kept[place] = _sum(got)
    touched = _touched(bench, kept)
    return {**seen.facts(), "others_kept": not touched, "other": touched}


def sub_blocks(bench: Bench) -> Facts:
    """Whether the first rows of a block can be sent and fetched alone, in every geometry: in the
    first block, one between and the last.
    """
    facts: Facts = {}
    try:
        for name, cache in by_geometry(bench.opened.caches).items():
            counts = sorted({1, cache.rows // 2 + 1, cache.rows - 1} & set(range(1, cache.rows)))
            last = lane_blocks(cache, bench.opened.positions)[-1]
            facts[name] = all(
                _is_moved_alone(bench, Place(cache, block), rows)
                for block in sorted({0, (last + 1) // 2, last})
                for rows in counts
            )
        works = all(facts.values())
    except DeviceError as exc:  # that it cannot be done is what is to be known
        works, facts["why"] = False, str(exc)
    bench.sub_blocks = works
    return {"works": works, **facts}


def decode_places(bench: Bench) -> Facts:
    """Whether a decode step leaves its position where an import would have put it, in each cache.

    It needs no prompt, so every block of the lane is tried, and each window past its end: the step
    must write the row of its position, and keep those before it, or move a full window by one.
    elsewhere: the first place where it did not.
    """
    compiled, elsewhere = bench.opened, ""
    tried = prompts.decoded(compiled.caches, compiled.positions)
    bench.clear()
    for position in reversed(tried):  # what a step sees is what was sent, and zeros
        places = [
            Place(cache, position // cache.rows if cache.kind == "full" else LANE)
            for cache in compiled.caches
        ]
        for place in places:
            bench.send(place, bench.plain(place.cache, _BEFORE_A_STEP))
        compiled.decode(bench.tokens[0], position)
        for place in places:
            elsewhere = elsewhere or _written_elsewhere(bench, place, position)
    return {"as_imported": not elsewhere, "elsewhere": elsewhere, "positions": list(tried)}


def _written_elsewhere(bench: Bench, place: Place, position: int) -> str:
    cache = place.cache
    got, old = (
        bits.view(cache.heads, cache.rows, -1)
        for bits in (bench.fetch(place), bench.plain(cache, _BEFORE_A_STEP))
    )
    slides = cache.kind == "sliding" and position >= cache.rows
    row = cache.rows - 1 if slides else position % cache.rows
    kept = old[:, 1:] if slides else old[:, :row]
    written = (got[:, row] != old[:, row]).any(1)
    if torch.equal(got[:, :row], kept) and bool(written.all()):
        return ""
    return f"position {position} is not in row {row} of {place}"


def costs(bench: Bench) -> Facts:
    """Medians of a few: ms and GB/s of one block of each geometry, and ms of a decode step."""
    facts: Facts = {}
    for name, cache in by_geometry(bench.opened.caches).items():
        place, plain = Place(cache, 0), bench.plain(cache, 1)
        nbytes = plain.numel() * plain.element_size()
        bits_of(bench.mirror(cache), 0).copy_(plain)
        sent, fetched = bench.mirror(cache), bench.mirror(cache, "fetched")
        calls: dict[str, Callable[[], None]] = {
            "update": partial(bench.opened.update, cache, sent, place.block, cache.rows),
            "fetch": partial(bench.opened.fetch, cache, fetched, place.block, cache.rows),
        }
        facts[f"{name}: nbytes"] = nbytes
        for call, work in calls.items():
            took = _timed(work)
            facts[f"{name}: {call}, ms"] = took * 1e3
            facts[f"{name}: {call}, GB/s"] = nbytes / took / 1e9
    bench.clear()
    bench.opened.prefill(bench.first(bench.short))
    facts["decode step, ms"] = 1e3 * _timed(
        partial(bench.opened.decode, bench.tokens[0], bench.short)
    )
    return facts


class _Seen:
    """What became of the elements that were sent."""

    def __init__(self) -> None:
        self._elements = 0
        self._changed = 0
        self._finite: dict[str, int] = {}
        self._sent = np.zeros(1 << 16, bool)
        self._lost = np.zeros(1 << 16, bool)
        self._first = ""
        self._converted = True

    def add(self, place: Place, want: torch.Tensor, got: torch.Tensor, width: int) -> None:
        """The bits of a block as they were sent and as they came; width: bytes of an element."""
        if width == torch.int16.itemsize:
            self._sent[want.numpy().view(np.uint16)] = True
            self._lost[want[got != want].numpy().view(np.uint16)] = True
        else:
            want, got = want.view(torch.int32), got.view(torch.int32)
        differs = got != want
        self._elements += want.numel()
        self._changed += int(differs.sum())
        for name, finite in _finite(place.cache, want, width).items():
            self._finite[name] = self._finite.get(name, 0) + int((differs & finite).sum())
            if name == "declared" and bool(differs.any()):
                self._converted &= _is_converted(place.cache, want[finite], got[finite])
        if not self._first and bool(differs.any()):
            at = int(differs.nonzero()[0])
            digits, mask = 2 * width, (1 << 8 * width) - 1
            sent, came = (int(each[at]) & mask for each in (want, got))
            self._first = f"{place}, element {at}: {sent:0{digits}x} as {came:0{digits}x}"

    def facts(self) -> Facts:
        return {
            "elements": self._elements,
            "identical": self._changed == 0,
            "changed": self._changed,
            "finite_changed": self._finite,
            "first_changed": self._first,
            "converted": self._finite.get("declared", 0) > 0 and self._converted,
            "patterns": int(self._sent.sum()),
            "patterns_changed": int(self._lost.sum()),
        }


def _finite(cache: Cache, bits: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """Which elements are numbers, in each format that their width allows."""
    found = {}
    if DTYPES[cache.dtype].itemsize == width:
        found["declared"] = bits.view(DTYPES[cache.dtype]).isfinite()
    if width == torch.int16.itemsize:
        found["custom_float16"] = (bits >> MANTISSA_BITS & _EXPONENT) != _EXPONENT
    return found


def _is_converted(cache: Cache, want: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether numbers came back as they are once the runtime's own 16-bit float has had them."""
    declared = DTYPES[cache.dtype]
    values = decode(encode(want.view(declared)), torch.float32).to(declared)
    return torch.equal(values, got.view(declared))


def _lost(bench: Bench) -> str:
    """Why a block of plain numbers does not come back; empty if it does, in every geometry."""
    try:
        for cache in by_geometry(bench.opened.caches).values():
            place, plain = Place(cache, 0), bench.plain(cache, 0)
            bench.send(place, plain)
            if not torch.equal(bench.fetch(place, before=bench.plain(cache, 1)), plain):
                return f"{place} came back otherwise"
    except DeviceError as exc:  # what a card without memory for its caches does
        return str(exc)
    return ""


def _touched(bench: Bench, kept: dict[Place, int]) -> str:
    """What a transfer changed beside its own block; empty if nothing.

    All blocks were sent in order, so what spilled into one before was seen. What spills into one
    behind is seen once the first of all is sent anew.
    """
    overwritten = set()
    for cache in by_geometry(bench.opened.caches).values():
        place = next(each for each in kept if each.cache == cache)
        mirror = bench.mirror(cache, "fetched")
        halves = mirror.rows.view(torch.int16)
        halves.fill_(_LEFT)
        bench.opened.fetch(cache, mirror, place.block, cache.rows)
        halves[place.block].fill_(_LEFT)
        if not bool((halves == _LEFT).all()):
            return f"the mirror around {place}, by its fetch"
        bench.send(place, bench.plain(cache, 2))
        overwritten.add(place)
    for place, before in kept.items():
        if (_sum(bench.fetch(place)) == before) is (place in overwritten):
            return f"{place}, by an update of another block"
    return ""


def _sum(bits: torch.Tensor) -> int:
    return zlib.crc32(bits.numpy().tobytes())


def _is_moved_alone(bench: Bench, place: Place, rows: int) -> bool:
    """Whether `rows` rows are sent, and fetched, and none beside them."""
    cache = place.cache
    old, new, left = (bench.plain(cache, shift) for shift in (3, 4, 5))
    bench.send(place, old)
    bench.send(place, new, rows)
    sent = torch.equal(bench.fetch(place, before=left), _merged(cache, new, old, rows))
    fetched = torch.equal(bench.fetch(place, left, rows), _merged(cache, new, left, rows))
    return sent and fetched


def _merged(cache: Cache, first: torch.Tensor, rest: torch.Tensor, rows: int) -> torch.Tensor:
    """`first` in the first rows of each head, and `rest` in the others."""
    merged = rest.clone().view(cache.heads, cache.rows, -1)
    merged[:, :rows] = first.view(cache.heads, cache.rows, -1)[:, :rows]
    return merged.view(-1)


def _timed(work: Callable[[], Any]) -> float:
    """The median host time in seconds; the first time is left out."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times[1:])
