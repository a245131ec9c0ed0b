"""A request that starts where its bound storage ends: what is refused, emitted and written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headrace.backends.base import Reservation
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.paged import Binding, PagedDecoder
from headrace.backends.replay import open as open_replay
from headrace.errors import Refused, WouldBlock
from headrace.ids import AttemptId, RequestId
from headrace.plan import compile_plan
from headrace.runtime.active import Active
from headrace.runtime.keeping import Keeping
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle
from headrace.testing.sinks import MemorySink, ask
from tests.unit.backends.plain_cache import CANARY, PlainCache

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 40
GEOMETRY: dict[str, Any] = {
    "layers": 3,
    "heads": 2,
    "head_dim": 4,
    "dtype": "float32",
    "window": 6,
    "full_every": 3,
    "vocab_size": 32,
    "max_positions": CONTEXT,
}
PROMPT = list(range(1, 17))
BLOCKS = (3, 9, 1, 5)
ROUTES: list[dict[str, Any]] = [
    {"route": "whole"},
    {"route": "chunked", "chunk": 3},
    {"route": "streamed", "chunk": 3},
    {"route": "streamed", "emission": "cache_groups", "prefill_chunk": 5, "digest": True},
]


class Stand:
    """An owner of a paged decoder with a replay source."""

    def __init__(self, owner: DecoderOwner, decoder: PagedDecoder, cache: PlainCache) -> None:
        self.owner, self.decoder, self.cache = owner, decoder, cache
        self.label = 0

    def run(self, start: int, options: RequestOptions, *, bound: int | None = None) -> Request:
        """Submit with `start`, over storage that was bound from `bound` on."""
        self.label += 1
        label = self.label
        self.decoder.bind(Binding(label, 16, (BLOCKS,), start if bound is None else bound))
        try:
            request = self.owner.submit(PROMPT, options, label=label, start=start)
            self.owner.run_until_done(request)
            for attempt, apart in self.owner.quarantined().items():
                assert apart.lane
                self.owner.reinstate(attempt)
            assert self.owner.drain()
        finally:
            self.decoder.unbind(label)
        return request


@contextmanager
def served(geometry: dict[str, Any] = GEOMETRY) -> Iterator[Stand]:
    handle = SourceHandle("replay", geometry)
    handle.start()
    owner = None
    try:
        cache = PlainCache(decoder_like(handle.manifest))
        decoder = PagedDecoder(cache)
        owner = DecoderOwner(decoder, context=CONTEXT)
        owner.attach(handle)
        yield Stand(owner, decoder, cache)
        owner.check_integrity()
    finally:
        if owner is not None:
            owner.close()
        handle.close()


def test_only_what_comes_after_start_is_emitted_and_written() -> None:
    engine = open_replay(GEOMETRY)
    plan = compile_plan(decoder_like(engine.manifest()), "head_major", 16, CONTEXT)
    whole = MemorySink(plan, ask(16))
    engine.prefill_stream(PROMPT, whole)
    with served() as stand:
        for start in (4, 10, 15):
            for asked in ROUTES:
                for cells in stand.cache.cells.values():
                    cells.fill_(CANARY)
                request = stand.run(start, RequestOptions(max_tokens=0, **asked))
                assert request.outcome == "finished", request.reason
                assert request.reuse is None
                row_nbytes = sum(layer.row_nbytes for layer in plan.layers)
                assert request.measured is not None
                live = [min(16 - start, hi - lo) for lo, hi in plan.windows]
                assert request.measured.kv_nbytes == sum(live) * row_nbytes // len(live)
                check_rows(stand, whole, start)


def check_rows(stand: Stand, whole: MemorySink, start: int) -> None:
    """Positions from `start` on are those of a prefill of all, and all others are canaries."""
    for (layer, part), nbytes in whole.cells().items():
        lo = whole.windows[layer][0]
        first = max(lo, start)
        made = torch.frombuffer(bytearray(nbytes), dtype=torch.float32).view(2, -1, 4)
        table = torch.tensor(BLOCKS)
        positions = torch.arange(first, 16)
        rows = stand.cache.read(layer, part, table[positions // 4] * 4 + positions % 4)
        wanted = made[:, first - lo :].permute(1, 0, 2).contiguous()
        assert torch.equal(rows.view(torch.int32), wanted.view(torch.int32))
        written = {(BLOCKS[at // 4], at % 4) for at in range(first, 16)}
        assert stand.cache.written(layer, part) == written


def test_a_start_of_zero_is_a_plain_request() -> None:
    with served({**GEOMETRY, "prefix": "none"}) as stand:
        request = stand.run(0, RequestOptions(max_tokens=0))
        assert request.outcome == "finished"
        with pytest.raises(Refused, match="whole prompts only; leave start out") as told:
            stand.run(4, RequestOptions(max_tokens=0))
        assert told.value.field == "start"


def test_what_was_bound_from_elsewhere_is_not_written() -> None:
    """The owner's start and the binding's disagree: the import is refused, and the request ends."""
    with served() as stand:
        request = stand.run(4, RequestOptions(max_tokens=0), bound=8)
        assert request.outcome == "failed"
        assert "are for [8, 16)" in request.reason
        assert not any(stand.decoder.statistics().values())
        assert all(bool((cells == CANARY).all()) for cells in stand.cache.cells.values())


@pytest.mark.parametrize("start", [-1, 16, 17])
def test_a_start_outside_of_the_prompt(start: int) -> None:
    owner = owner_without_sources()
    with pytest.raises(Refused, match=f"start is {start} and the prompt has 16") as told:
        owner.submit(PROMPT, RequestOptions(max_tokens=0), label=1, start=start)
    assert told.value.field == "start"
    owner.close()


def test_a_start_beside_a_prefix() -> None:
    owner = owner_without_sources()
    options = RequestOptions(max_tokens=0, prefix="identical")
    with pytest.raises(Refused, match="give one") as told:
        owner.submit(PROMPT, options, label=1, start=4)
    assert told.value.field == "start"
    owner.close()


def owner_without_sources() -> DecoderOwner:
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    return DecoderOwner(PagedDecoder(PlainCache(manifest)), context=CONTEXT)


def test_a_start_over_storage_of_the_decoders_own() -> None:
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    owner = DecoderOwner(NullDecoder(manifest, context=CONTEXT, lanes=1), context=CONTEXT)
    with pytest.raises(Refused, match="whose storage its caller binds") as told:
        owner.submit(PROMPT, RequestOptions(max_tokens=0), start=4)
    assert told.value.field == "start"
    owner.close()


def test_storage_that_was_not_bound() -> None:
    """It waits for no lane: what is not bound will not be."""
    with served() as stand:
        request = stand.owner.submit(PROMPT, RequestOptions(max_tokens=0), label=77)
        stand.owner.run_until_done(request)
        assert request.outcome == "failed"
        assert "no blocks for 16 tokens are bound to label 77" in request.reason
        assert stand.owner.drain()


@pytest.mark.parametrize(
    ("start", "asked", "cuts"),
    [(0, (), ()), (0, (3, 9), (3, 9)), (6, (), (6,)), (6, (3, 9), (3, 6)), (6, (6,), (6,))],
)
def test_the_prefill_is_cut_where_it_starts(
    start: int, asked: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    """The last cut is the start, so that the cells are those of a run from 0 that is cut there."""
    request = Request(RequestId(1, 1), 16, RequestOptions(prefill_cuts=asked))
    active = Active(AttemptId(1, 1, 1), request, PROMPT, None, start)
    assert (active.start, active.cuts) == (start, cuts)


# How storage is reserved.


class ByLabel(NullDecoder):
    """Reserves for what it was told, and keeps that."""

    def __init__(self) -> None:
        manifest = decoder_like(open_replay(GEOMETRY).manifest())
        super().__init__(manifest, context=CONTEXT, lanes=1)
        self.asked: list[tuple[int | None, int]] = []

    def reserve(self, num_tokens: int) -> Reservation:
        raise AssertionError("storage is reserved by its label")

    def reserve_for(self, label: int | None, num_tokens: int) -> Reservation:
        self.asked.append((label, num_tokens))
        if label is None:
            raise WouldBlock("nothing is bound")
        return super().reserve(num_tokens)


def test_a_decoder_that_reserves_by_label_is_told_the_label() -> None:
    decoder = ByLabel()
    keeping = Keeping(decoder, decoder.manifest())
    with pytest.raises(WouldBlock):
        keeping.reserve(None, 8)
    reservation = keeping.reserve(None, 9, 5)
    assert isinstance(reservation, Reservation)
    assert decoder.asked == [(None, 8), (5, 9)]
    decoder.close()


def test_other_decoders_are_told_no_label() -> None:
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    decoder = NullDecoder(manifest, context=CONTEXT, lanes=1)
    keeping = Keeping(decoder, manifest)
    reservation = keeping.reserve(None, 9, 5)
    assert (reservation.lane, reservation.num_tokens) == (0, 9)
    decoder.close()
