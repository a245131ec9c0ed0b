"""A decoder over blocks that its caller binds: which it takes, and what it writes there."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.backends import paged
from headrace.backends.base import Entry, Reservation, ReservesByLabel, SlotView
from headrace.backends.null import decoder_like
from headrace.backends.paged import Binding, PagedDecoder
from headrace.backends.replay import open as open_replay
from headrace.engine.host import HostMemory
from headrace.errors import Closed, HeadraceError, LocalProtocolError, Refused, WouldBlock
from headrace.geometry import Layer, Layout, Manifest, Shared, Sliding
from headrace.ids import Span
from headrace.plan import Copy, Plan, compile_plan
from headrace.testing.sinks import MemorySink, ask
from tests.unit.backends.plain_cache import CANARY, PlainCache

pytestmark = pytest.mark.usefixtures("one_thread")

GEOMETRY: dict[str, Any] = {
    "layers": 3,
    "heads": 2,
    "head_dim": 4,
    "dtype": "float32",
    "window": 6,
    "full_every": 3,
    "vocab_size": 32,
    "max_positions": 40,
}
GROUP_OF = {0: 1, 1: 1, 2: 0}  # the sliding layers are of a group of their own
CONTEXT = 32
LAYOUTS: tuple[Layout, ...] = ("head_major", "token_major")


def manifest_of(tail: int = 8) -> Manifest:
    """A decoder's: two layers of which the last `tail` rows matter, and a full one."""
    made = decoder_like(open_replay(GEOMETRY).manifest())
    layers = [
        Layer(each.index, each.name, Sliding(6, tail), each.parts)
        if isinstance(each.kind, Sliding)
        else each
        for each in made.layers
    ]
    return replace(made, layers=tuple(layers))


@pytest.fixture
def cache() -> PlainCache:
    return PlainCache(manifest_of(), groups=(4, 2), group_of=GROUP_OF, num_blocks=24)


@pytest.fixture
def decoder(cache: PlainCache) -> PagedDecoder:
    return PagedDecoder(cache)


def ids(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def binding(label: int = 1, first: int = 1, num_tokens: int = 16, **more: Any) -> Binding:
    """Blocks of 4 positions of group 0, and of 2 of group 1; null where nothing is live."""
    given: dict[str, Any] = {"block_ids": (ids(first, 4), (0, 0, 0, 0, *ids(first + 4, 4)))}
    return Binding(label, num_tokens, **(given | more))


class Slot:
    """What a source made of a prompt, in a slot."""

    def __init__(self, plan: Plan, start: int = 0) -> None:
        engine, count = open_replay({**GEOMETRY, "layout": plan.layout}), plan.num_tokens
        self.sink = MemorySink(plan, ask(count, start=start, cuts=(start,) if start else ()))
        engine.prefill_stream(list(range(count)), self.sink, start)
        self._memory = HostMemory(plan.slot.nbytes)
        self._memory.view[:] = self.sink.buffer
        self.plan = plan
        self.view = SlotView(self._memory.view, self._memory.address, plan.layout)

    def cells(self, layer: int, part: int) -> bytes:
        return self.sink.cells()[layer, part]


def slot_of(decoder: PagedDecoder, layout: Layout = "head_major", start: int = 0) -> Slot:
    return Slot(compile_plan(decoder.manifest(), layout, 16, CONTEXT, start), start)


def all_copies(slot: Slot) -> list[Copy]:
    return slot.plan.copies(slot.plan.whole())


# Bindings.


def test_what_is_bound_is_what_is_reserved(decoder: PagedDecoder) -> None:
    assert isinstance(decoder, ReservesByLabel)
    decoder.bind(binding(5))
    assert not decoder.holds(5)
    reservation = decoder.reserve_for(5, 16)
    assert (reservation.lane, reservation.num_tokens) == (5, 16)
    assert decoder.holds(5)
    counts = {"lanes_reserved": 1, "lanes_published": 0, "bound": 1}
    assert decoder.statistics() == counts
    entry = decoder.publish(reservation)
    assert entry == Entry(5, 16, reservation.serial)
    assert decoder.statistics() == {**counts, "lanes_reserved": 0, "lanes_published": 1}
    decoder.unbind(5)
    assert decoder.holds(5), "until it is freed"
    decoder.free(entry)
    assert not decoder.holds(5)
    assert not any(decoder.statistics().values())
    decoder.unbind(5)


@pytest.mark.parametrize(("label", "num_tokens"), [(None, 16), (2, 16), (1, 15)])
def test_what_is_not_bound_is_not_reserved(
    decoder: PagedDecoder, label: int | None, num_tokens: int
) -> None:
    decoder.bind(binding(1))
    with pytest.raises(WouldBlock, match=f"no blocks for {num_tokens} tokens"):
        decoder.reserve_for(label, num_tokens)
    with pytest.raises(WouldBlock, match="bound to a label"):
        decoder.reserve(16)
    decoder.reserve_for(1, 16)
    with pytest.raises(WouldBlock):
        decoder.reserve_for(1, 16)


def test_a_further_attempt_reserves_the_same(decoder: PagedDecoder) -> None:
    decoder.bind(binding(1))
    first = decoder.reserve_for(1, 16)
    decoder.free(first)
    second = decoder.reserve_for(1, 16)
    assert second.serial != first.serial
    with pytest.raises(LocalProtocolError, match="is stale"):
        decoder.free(first)
    assert decoder.holds(1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (binding(1, 9), "label 1 has blocks already"),
        (binding(2, 3), r"blocks \[3, 4, 5, 6, 7, 8\] of label 2 are held by 1"),
        (binding(2, 9, block_ids=(ids(9, 4), (0, 0, 0, 0, 13, 14, 15, 13))), "a block twice"),
        (binding(2, 9, block_ids=(ids(9, 3), ids(13, 8))), "3 blocks of cache group 0 .* need 4"),
        (binding(2, 9, block_ids=(ids(9, 4), ids(13, 7))), "7 blocks of cache group 1 .* need 8"),
        (binding(2, 9, block_ids=(ids(9, 4),)), "0 blocks of cache group 1"),
        (binding(2, block_ids=((9, 10, 0, 11), ids(12, 8))), r"blocks \[0\] of label 2 are none"),
        (binding(2, block_ids=((9, 10, 24, 11), ids(12, 8))), r"blocks \[24\]"),
        (binding(2, block_ids=((9, 10, -1, 11), ids(12, 8))), r"blocks \[-1\]"),
    ],
)
def test_bindings_that_are_refused(decoder: PagedDecoder, given: Binding, says: str) -> None:
    """Each leaves no trace."""
    decoder.bind(binding(1))
    with pytest.raises(LocalProtocolError, match=says):
        decoder.bind(given)
    assert decoder.statistics()["bound"] == 1


def test_blocks_are_held_until_they_are_freed(decoder: PagedDecoder) -> None:
    decoder.bind(binding(1))
    reservation = decoder.reserve_for(1, 16)
    decoder.unbind(1)
    with pytest.raises(LocalProtocolError, match="are held by 1"):
        decoder.bind(binding(2))
    with pytest.raises(LocalProtocolError, match="label 1 has blocks already"):
        decoder.bind(binding(1, 9))
    decoder.free(reservation)
    decoder.bind(binding(2))


def test_blocks_that_are_never_written_may_be_shared(decoder: PagedDecoder) -> None:
    """Those before `start`, which vLLM's prefix cache gives to several."""
    shared = ids(1, 2)
    for label, first in ((1, 3), (2, 9)):
        rest = shared + ids(first, 2), (0, 0, 0, 0, *ids(first + 2, 4))
        decoder.bind(binding(label, block_ids=rest, start=8))
    with pytest.raises(LocalProtocolError, match=r"blocks \[3\] of label 3"):
        decoder.bind(binding(3, block_ids=((20, 21, 3, 22), (0,) * 4 + ids(15, 4)), start=8))
    decoder.bind(binding(4, block_ids=((3, 4, 20, 21), (0,) * 4 + ids(15, 4)), start=8))


def test_layers_that_share_have_no_blocks() -> None:
    first, *rest = manifest_of().layers
    shared = Layer(1, "layers.1", Shared(first.name), ())
    manifest = replace(manifest_of(), layers=(first, shared, rest[1]))
    decoder = PagedDecoder(PlainCache(manifest, groups=(4, 2), group_of=GROUP_OF, num_blocks=24))
    decoder.bind(binding(1))
    slot = slot_of(decoder)
    decoder.begin_import(decoder.reserve_for(1, 16), slot.view, all_copies(slot))


# Imports.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [16, 5, 1])
def test_what_is_imported_is_read_again(
    decoder: PagedDecoder, cache: PlainCache, layout: Layout, step: int
) -> None:
    slot = slot_of(decoder, layout)
    decoder.bind(binding(1))
    reservation = decoder.reserve_for(1, 16)
    for at in range(0, 16, step):
        piece = Span(0, 3, at, min(at + step, 16))
        copies = slot.plan.copies(piece)
        fence = decoder.begin_import(reservation, slot.view, copies)
        assert fence.done()
        for copy in copies:
            assert len(decoder.read(reservation, layout, copy)) == copy.nbytes
    entry = decoder.publish(reservation)
    for copy in all_copies(slot):
        assert bytes(decoder.read(entry, layout, copy)) == slot.cells(copy.layer, copy.part)
    for layer, part in cache.cells:
        size, first, count = (4, 1, 4) if layer == 2 else (2, 5, 4)
        written = {(block, place) for block in ids(first, count) for place in range(size)}
        assert cache.written(layer, part) == written


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_before_start_are_left_alone(
    decoder: PagedDecoder, cache: PlainCache, layout: Layout
) -> None:
    slot = slot_of(decoder, layout, start=10)
    decoder.bind(binding(1, start=10))
    reservation = decoder.reserve_for(1, 16)
    decoder.begin_import(reservation, slot.view, all_copies(slot))
    for copy in all_copies(slot):
        assert copy.start == 10
        assert bytes(decoder.read(reservation, layout, copy)) == slot.cells(copy.layer, copy.part)
    assert cache.written(2, 0) == {(3, 2), (3, 3), *((4, place) for place in range(4))}
    assert cache.written(0, 1) == {(block, place) for block in (6, 7, 8) for place in (0, 1)}


def bad_copies(slot: Slot) -> dict[str, list[Copy]]:
    full = slot.plan.copies(Span(2, 3, 0, 4))
    sliding = slot.plan.copies(Span(0, 1, 8, 12))
    return {
        "parts": full[:1],
        "of 3": [full[0]._replace(layer=3), full[1]._replace(layer=3)],
        "part 2": [full[0]._replace(part=2), full[1]],
        r"positions \[2, 6\) of layers\.0": [each._replace(start=2, stop=6) for each in sliding],
        r"positions \[4, 4\)": [each._replace(stop=4, start=4) for each in full],
        r"positions \[14, 18\)": [each._replace(start=14, stop=18) for each in full],
        "expected": [each._replace(stop=5) for each in full],
        "reaches past": [
            each._replace(source=each.source._replace(offset=slot.plan.slot.nbytes - 8))
            for each in full
        ],
    }


@pytest.mark.parametrize("at", range(8))
def test_copies_that_do_not_fit_write_nothing(
    decoder: PagedDecoder, cache: PlainCache, at: int
) -> None:
    """Not even the good ones that were given with them."""
    slot = slot_of(decoder)
    decoder.bind(binding(1))
    reservation = decoder.reserve_for(1, 16)
    says, copies = list(bad_copies(slot).items())[at]
    good = slot.plan.copies(Span(1, 2, 8, 16))
    with pytest.raises(LocalProtocolError, match=says):
        decoder.begin_import(reservation, slot.view, [*good, *copies])
    assert all(bool((cells == CANARY).all()) for cells in cache.cells.values())


def test_a_slot_that_starts_before_the_binding_does(decoder: PagedDecoder) -> None:
    slot = slot_of(decoder)
    decoder.bind(binding(1, start=8))
    reservation = decoder.reserve_for(1, 16)
    says = r"positions \[0, 16\) of layers\.2; the blocks of label 1 are for \[8, 16\)"
    with pytest.raises(LocalProtocolError, match=says):
        decoder.begin_import(reservation, slot.view, slot.plan.copies(Span(2, 3, 0, 16)))
    with pytest.raises(LocalProtocolError, match="are for"):
        decoder.read(reservation, "head_major", slot.plan.copies(Span(2, 3, 0, 4))[0])


def test_what_was_not_published_is_zeros_when_it_is_freed(
    decoder: PagedDecoder, cache: PlainCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what something was imported into, in as many pieces as it takes."""
    monkeypatch.setattr(paged, "CLEAR_NBYTES", 1)
    slot = slot_of(decoder, start=10)
    decoder.bind(binding(1, start=10))
    decoder.free(decoder.reserve_for(1, 16))
    assert all(bool((cells == CANARY).all()) for cells in cache.cells.values())
    reservation = decoder.reserve_for(1, 16)
    decoder.begin_import(reservation, slot.view, slot.plan.copies(Span(2, 3, 10, 12)))
    decoder.free(reservation)
    written = {(3, 2), (3, 3)}
    assert cache.written(2, 0) == written
    assert not any(bool(cache.cells[2, 0][at].any()) for at in written)
    assert cache.written(0, 1) == set()


def test_what_is_stale_neither_writes_nor_reads(decoder: PagedDecoder, cache: PlainCache) -> None:
    """A late span of a request whose blocks are another's by now."""
    slot = slot_of(decoder)
    decoder.bind(binding(1))
    late = decoder.reserve_for(1, 16)
    decoder.free(late)
    decoder.unbind(1)
    decoder.bind(binding(2))
    decoder.reserve_for(2, 16)
    calls: list[Any] = [
        lambda: decoder.begin_import(late, slot.view, all_copies(slot)),
        lambda: decoder.read(late, "head_major", all_copies(slot)[0]),
        lambda: decoder.publish(late),
        lambda: decoder.free(late),
    ]
    for call in calls:
        with pytest.raises(LocalProtocolError, match="is stale: nothing is held there"):
            call()
    assert all(bool((cells == CANARY).all()) for cells in cache.cells.values())


def test_what_is_published_is_imported_into_no_more(decoder: PagedDecoder) -> None:
    slot = slot_of(decoder)
    decoder.bind(binding(1))
    reservation = decoder.reserve_for(1, 16)
    decoder.publish(reservation)
    with pytest.raises(LocalProtocolError, match=r"is stale: Entry"):
        decoder.begin_import(reservation, slot.view, all_copies(slot))


def test_it_decodes_nothing_and_ends(decoder: PagedDecoder) -> None:
    assert not decoder.caps.decodes
    decoder.bind(binding(1))
    reservation: Reservation = decoder.reserve_for(1, 16)
    with pytest.raises(LocalProtocolError, match="decodes nothing"):
        decoder.decode_step([(decoder.publish(reservation), 1)])
    decoder.close()
    decoder.close()
    assert not decoder.holds(1)
    with pytest.raises(Closed):
        decoder.bind(binding(2))
    errors: tuple[type[HeadraceError], ...] = (WouldBlock, Refused)
    with pytest.raises(errors):
        decoder.reserve_for(1, 16)
