"""The lane on a card of paper: whatever is cut how, each block goes over when it is complete."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.atom.blocks import needed, window_start
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.lane import AtomLane, same_for_all
from headrace.engine.tensors import DTYPES
from headrace.errors import BackendUnavailable, DeviceError, LocalProtocolError, Refused
from tests.unit.engine.atom.paper_card import (
    Cells,
    PaperCard,
    caches_of,
    cells_of,
    lane_on,
)

BLOCKS = 4


class Piece(NamedTuple):
    """Positions [start, stop) of one cache."""

    layer: int
    part: int
    start: int
    stop: int


class Prompt(NamedTuple):
    """A geometry, a length, and the cells of all caches cut at random, in a random order."""

    rows: int
    window: int
    num_tokens: int
    seed: int

    @property
    def caches(self) -> tuple[Cache, ...]:
        return caches_of(self.rows, BLOCKS, self.window)

    def card(self) -> PaperCard:
        return PaperCard(self.caches, BLOCKS * self.rows)

    def cells(self, seed: int = 0) -> Cells:
        return cells_of(self.caches, self.num_tokens, self.seed + seed)

    def pieces(self, seed: int = 0) -> list[Piece]:
        rng = random.Random(self.seed + seed)
        found = []
        for cache in self.caches:
            first = window_start(cache, self.num_tokens)
            inside = range(first + 1, self.num_tokens)
            cuts = sorted(rng.sample(inside, rng.randint(0, min(6, len(inside)))))
            for start, stop in zip([first, *cuts], [*cuts, self.num_tokens], strict=True):
                found.append(Piece(cache.layer, cache.part, start, stop))
        rng.shuffle(found)
        return found

    def blocks(self) -> Counter[tuple[str, int]]:
        """Each block that has a row of the prompt, once."""
        return Counter(
            (cache.name, rows.block)
            for cache in self.caches
            for rows in needed(cache, self.num_tokens)
        )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    rows = draw(st.integers(1, 6))
    num_tokens = draw(st.integers(1, BLOCKS * rows))
    return Prompt(rows, draw(st.integers(1, 9)), num_tokens, draw(st.integers(0, 1 << 20)))


def bring(lane: AtomLane, piece: Piece, cells: Cells, prompt: Prompt) -> None:
    given = cells[piece.layer, piece.part]
    first = prompt.num_tokens - given.shape[1]
    lane.write(
        piece.layer, piece.part, piece.start, given[:, piece.start - first : piece.stop - first]
    )


def is_complete(lane: AtomLane) -> bool:
    try:
        lane.check_flushed()
    except LocalProtocolError:
        return False
    return True


def flushed(card: PaperCard) -> Counter[tuple[str, int]]:
    return Counter((name, block) for name, block, _ in card.updates)


def test_rows_that_wait_are_read_with_nothing_of_an_earlier_prompt_beside_them() -> None:
    """To be read they are flushed, and what they wait for is not there yet."""
    prompt = Prompt(6, 9, 5, 1)
    card, earlier, cells = prompt.card(), prompt.cells(1), prompt.cells(2)
    lane = lane_on(card)
    lane.begin(5)
    for piece in prompt.pieces(1):
        bring(lane, piece, earlier, prompt)
    lane.begin(5)
    bring(lane, Piece(0, 0, 1, 3), cells, prompt)
    assert torch.equal(lane.read(0, 0, 1, 3), cells[0, 0][:, 1:3])
    cache = prompt.caches[0]
    landed = card.memory[cache.name][0].clone()
    assert landed[:, 1:3].count_nonzero()
    landed[:, 1:3] = 0
    assert not landed.count_nonzero()


@given(prompts(), st.booleans())
def test_each_block_goes_over_once_whatever_is_cut_how(prompt: Prompt, reads_back: bool) -> None:
    """After its last row came, and no prompt is complete before all of it is there."""
    card, cells = prompt.card(), prompt.cells()
    lane = lane_on(card, reads_back=reads_back)
    lane.begin(prompt.num_tokens)
    for piece in prompt.pieces():
        assert not is_complete(lane)
        bring(lane, piece, cells, prompt)
    assert is_complete(lane)
    assert card.holds(cells, prompt.num_tokens)
    assert flushed(card) == prompt.blocks()
    assert len(card.fetches) == (len(card.updates) if reads_back else 0)
    assert not card.rest(prompt.num_tokens).count_nonzero()


@given(prompts(), st.integers(1, 40))
def test_a_kept_reservation_holds_the_second_attempt_alone(prompt: Prompt, came: int) -> None:
    """Of the first one some pieces came, in whatever cut; or all of it, as poison does."""
    card, first, second = prompt.card(), prompt.cells(1), prompt.cells(2)
    lane = lane_on(card)
    lane.begin(prompt.num_tokens)
    for piece in prompt.pieces(1)[:came]:
        bring(lane, piece, first, prompt)
    for piece in prompt.pieces(2):
        bring(lane, piece, second, prompt)
        if is_complete(lane):  # whatever was flushed is what was written
            assert card.holds(_mixed(lane), prompt.num_tokens)
    assert is_complete(lane)
    assert card.holds(second, prompt.num_tokens)


@given(prompts(), st.integers(1, 40))
def test_an_attempt_that_begins_anew_sends_each_block_once_and_must_be_whole(
    prompt: Prompt, came: int
) -> None:
    card, first, second = prompt.card(), prompt.cells(1), prompt.cells(2)
    lane = lane_on(card)
    lane.begin(prompt.num_tokens)
    for piece in prompt.pieces(1)[:came]:
        bring(lane, piece, first, prompt)
    lane.forget()
    card.updates.clear()
    for piece in prompt.pieces(2):
        assert not is_complete(lane)
        bring(lane, piece, second, prompt)
    assert is_complete(lane)
    assert card.holds(second, prompt.num_tokens)
    assert flushed(card) == prompt.blocks()


@given(prompts())
def test_whole_layers_over_poison_go_over_once(prompt: Prompt) -> None:
    card, poison, cells = prompt.card(), prompt.cells(1), prompt.cells(2)
    lane = lane_on(card)
    lane.begin(prompt.num_tokens)
    whole = [
        Piece(each.layer, each.part, window_start(each, prompt.num_tokens), prompt.num_tokens)
        for each in prompt.caches
    ]
    for given_cells in (poison, cells):
        card.updates.clear()
        for piece in whole:
            bring(lane, piece, given_cells, prompt)
        assert flushed(card) == prompt.blocks()
        assert card.holds(given_cells, prompt.num_tokens)


@given(prompts(), st.data())
def test_nothing_of_earlier_prompts_is_behind_the_last_one(
    prompt: Prompt, data: st.DataObject
) -> None:
    """However long they were, and however much of them came."""
    card = prompt.card()
    clears = data.draw(st.booleans())
    lane = lane_on(card, clears=clears)
    longest = BLOCKS * prompt.rows
    for num_tokens in data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=3)):
        other = prompt._replace(num_tokens=num_tokens)
        pieces = other.pieces()
        lane.begin(num_tokens)
        assert not clears or not card.rest(0).count_nonzero()
        for piece in pieces[: data.draw(st.integers(0, len(pieces)))]:
            bring(lane, piece, other.cells(), other)
        lane.end()
    lane.begin(prompt.num_tokens)
    assert not is_complete(lane)
    for piece in prompt.pieces():
        bring(lane, piece, prompt.cells(), prompt)
    assert card.holds(prompt.cells(), prompt.num_tokens)
    assert not card.rest(prompt.num_tokens).count_nonzero()


@given(prompts(), st.sampled_from(["float32", "float16", "bfloat16"]), st.booleans())
def test_what_is_read_is_what_was_sent(prompt: Prompt, sent: str, sub_blocks: bool) -> None:
    """Piece by piece as it comes, and all of it at the end, by way of the card."""
    card = prompt.card()
    lane = lane_on(card, sent, sub_blocks=sub_blocks)
    cells = cells_of(prompt.caches, prompt.num_tokens, prompt.seed, sent)
    lane.begin(prompt.num_tokens)
    for piece in prompt.pieces():
        bring(lane, piece, cells, prompt)
        first = prompt.num_tokens - cells[piece.layer, piece.part].shape[1]
        read = lane.read(*piece)
        assert read.dtype == DTYPES[sent]
        assert torch.equal(
            read, cells[piece.layer, piece.part][:, piece.start - first : piece.stop - first]
        )
    for (layer, part), given_cells in cells.items():
        start = prompt.num_tokens - given_cells.shape[1]
        assert torch.equal(lane.read(layer, part, start, prompt.num_tokens), given_cells)
    assert lane.counts["fetches"] >= len(card.fetches) > 0


def test_only_rows_of_the_prompt_go_over_where_that_works() -> None:
    card = PaperCard(caches_of(4, BLOCKS, 8), 16)
    lane = lane_on(card, sub_blocks=True)
    prompt = Prompt(4, 8, 6, 0)
    before = lane.counts["flushed_nbytes"]
    lane.begin(6)
    for piece in prompt.pieces():
        bring(lane, piece, prompt.cells(), prompt)
    names = [each.name for each in card.caches]
    assert Counter(card.updates) == Counter(
        [(name, 0, 6) for name in names[2:4]]
        + [(name, *each) for name in names[:2] + names[4:] for each in ((0, 4), (1, 2))]
    )
    assert lane.counts["flushed_nbytes"] - before == 2 * 6 * 2 * 4 * (4 + 4 + 8)


def test_what_has_no_row_is_refused_and_changes_nothing() -> None:
    prompt = Prompt(4, 4, 10, 0)
    card, cells = prompt.card(), prompt.cells()
    lane = lane_on(card)
    with pytest.raises(LocalProtocolError):  # nothing is reserved
        lane.write(0, 0, 0, cells[0, 0])
    lane.begin(10)
    for piece in prompt.pieces():
        bring(lane, piece, cells, prompt)
    for layer, start, stop in ((1, 5, 9), (0, 8, 11), (0, -1, 3)):
        with pytest.raises(LocalProtocolError):
            lane.write(layer, 0, start, torch.zeros(2, stop - start, 4))
        with pytest.raises(LocalProtocolError):
            lane.check_rows(layer, 0, start, stop)
        with pytest.raises(LocalProtocolError):
            lane.read(layer, 0, start, stop)
    assert is_complete(lane)
    assert card.holds(cells, 10)
    lane.end()
    with pytest.raises(LocalProtocolError):
        lane.read(0, 0, 0, 10)


def test_a_missing_row_is_told_by_block_and_cache() -> None:
    lane = lane_on(PaperCard(caches_of(4, BLOCKS, 8), 16))
    lane.begin(6)
    lane.write(0, 0, 0, torch.ones(2, 3, 4))
    text = r"block 0 of past_key_values_0 has 3 of 4 rows, and was not flushed since"
    with pytest.raises(LocalProtocolError, match=text):
        lane.check_flushed()
    with pytest.raises(
        LocalProtocolError, match=r"rows \[0, 4\) of block 0 of past_key_values_0 n"
    ):
        lane.read(0, 0, 0, 4)


def test_a_window_has_moved_once_it_is_longer_than_its_rows() -> None:
    lane = lane_on(PaperCard(caches_of(4, BLOCKS, 8), 16))
    assert [lane.slid(1, length) for length in (8, 9)] == [False, True]
    assert not lane.slid(0, 16)


def test_a_card_that_keeps_nothing_is_refused_before_any_prompt() -> None:
    class Stale(PaperCard):
        def update(self, *args: object) -> None:
            pass

    with pytest.raises(BackendUnavailable, match="came back otherwise") as raised:
        lane_on(Stale(caches_of(4, BLOCKS, 8), 16))
    assert (raised.value.vendor, raised.value.stage) == ("rebellions", "layout_unverified")
    assert "restart its driver" in str(raised.value)


def test_a_block_that_is_not_there_is_told_if_it_is_read_back() -> None:
    card = PaperCard(caches_of(4, BLOCKS, 8), 16)
    lane = lane_on(card, reads_back=True)
    card.__dict__["update"] = lambda *args: None
    lane.begin(4)
    with pytest.raises(DeviceError, match="block 0 of past_key_values_0 does not hold what was"):
        lane.write(0, 0, 0, torch.ones(2, 4, 4))
    assert not is_complete(lane)


def test_a_card_is_warmed_up_before_it_is_written() -> None:
    class Cold(PaperCard):
        def update(self, *args: object) -> None:
            assert self.prefills

    card = Cold(caches_of(4, BLOCKS, 8), 16)
    with pytest.raises(BackendUnavailable):  # which keeps nothing, but that is not the point
        lane_on(card, warms_up=True)
    assert card.prefills == [(0,)]


def test_it_asks_for_its_memory_before_it_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors of 2 x (256 + 128 + 512) bytes, and one more of each to fetch into."""
    monkeypatch.setattr("headrace.engine.capacity.available_nbytes", lambda: 1 << 20)
    with pytest.raises(Refused, match="host mirrors of the card's caches: needs 2688 bytes"):
        lane_on(PaperCard(caches_of(4, 2, 4), 8))


def test_its_casts_are_told_in_words() -> None:
    lane = lane_on(PaperCard(caches_of(4, BLOCKS, 8), 16), "bfloat16")
    assert same_for_all(lane.casts) == "bfloat16 to float32: exact"


def _mixed(lane: AtomLane) -> Cells:
    """What the mirrors have, as cells of the prompt."""
    found: Cells = {}
    for each in lane._caches:
        rows = [
            each.mirror.rows[number, :, : block.wanted] for number, block in each.blocks.items()
        ]
        found[each.cache.layer, each.cache.part] = torch.cat(rows, dim=1)
    return found
