"""The conformance suite of decoders that keep entries: what every `KeepsEntries` must keep to.

Subclass `KeepingConformance` with a decoder that keeps at least two entries of `context` positions;
all of `DecoderConformance` is checked of it too.

    class TestMyDecoderKeeps(KeepingConformance):
        def make_decoder(self, lanes: int) -> Decoder:
            return my_backend.open({"lanes": lanes, "context": self.context, "keep_nbytes": ...})
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Protocol, cast

from headrace.backends.base import Decoder, Entry, KeepsEntries, Kept, Reservation
from headrace.errors import WouldBlock
from headrace.ids import Span
from headrace.plan import Copy, live_window
from headrace.testing.conformance_decoder import (
    DecoderConformance,
    Held,
    Prompt,
    fenced,
    landed_cells,
    refused,
)
from headrace.testing.conformance_engine import require
from headrace.testing.sinks import region_bytes

TOKENS = (1, 2, 0)


class Keeper(Decoder, KeepsEntries, Protocol):
    """What is under test."""


class KeepingConformance(DecoderConformance):
    """Checks of one decoder that keeps entries.

    decoded: most tokens that are decoded after a prompt, enough to overwrite all rows of a window.
    """

    decoded: ClassVar[int] = 20

    def test_what_is_kept_is_counted(self) -> None:
        with self._keeper() as keeper:
            require(keeper.keeps_nbytes > 0, "it was told to keep nothing")
            require(keeper.kept_nbytes == 0, f"{keeper.kept_nbytes} bytes are kept of nothing")
            for evicted_first in (True, False):
                entry = keeper.publish(self._reserved(keeper, self._prompt(keeper)))
                before = keeper.statistics()
                kept = keeper.keep(entry)
                require(kept.num_tokens == entry.num_tokens, f"{entry} was kept as {kept}")
                require(keeper.kept_nbytes == kept.nbytes, "a memory that a lane uses is counted")
                require(keeper.statistics() != before, "statistics do not tell what is kept")
                if evicted_first:
                    keeper.evict(kept)
                keeper.free(entry)
                if not evicted_first:
                    told = keeper.kept_nbytes
                    require(told == kept.nbytes + kept.storage_nbytes, f"{kept} counts as {told}")
                    require(told <= keeper.keeps_nbytes, "it may not keep even one entry")
                    keeper.evict(kept)
                require(keeper.kept_nbytes == 0, "something is kept still")

    def test_kept_cells_come_back(self) -> None:
        """After its lane was given back and held others; as often as they are asked for."""
        with self._keeper() as keeper:
            for prompt, text in self._prompts(keeper):
                entry, kept = self._kept(keeper, prompt)
                rows = self._rows(keeper, entry)
                self._decode_on(keeper, entry)
                keeper.free(entry)
                self._soil(keeper, prompt.plan.layout)
                for _ in range(2):
                    again = self._again(keeper, kept)
                    require(
                        landed_cells(keeper, again, prompt) == prompt.cells(),
                        f"{text}: other cells",
                    )
                    require(self._rows(keeper, again) == rows, f"{text}: decodes otherwise")
                    self._decode_on(keeper, again)
                    keeper.free(again)
                keeper.evict(kept)

    def test_kept_cells_are_shared_while_the_entry_decodes(self) -> None:
        """By another entry of the same prompt: neither changes what the other decodes."""
        with self._keeper() as keeper:
            if keeper.caps.max_lanes < 2:
                return
            for prompt, text in self._prompts(keeper):
                entry, kept = self._kept(keeper, prompt)
                first, then = self._rows(keeper, entry), self._rows(keeper, entry)
                keeper.free(entry)
                keeper.evict(kept)
                entry, kept = self._kept(keeper, prompt)
                for rows in (first, then):
                    again = self._again(keeper, kept)
                    same = landed_cells(keeper, again, prompt) == prompt.cells()
                    require(same, f"{text}: other cells")
                    if keeper.caps.decode_batch == 1:
                        require(self._rows(keeper, again) == first, f"{text}: decodes otherwise")
                    self._decode_on(keeper, again)
                    same = self._rows(keeper, entry) == rows
                    require(same, f"{text}: the entry itself decodes otherwise")
                    keeper.free(again)
                self._decode_on(keeper, entry)
                again = self._again(keeper, kept)
                same = landed_cells(keeper, again, prompt) == prompt.cells()
                require(same, f"{text}: other cells after the entry's own decode")
                for each in (again, entry):
                    keeper.free(each)
                keeper.evict(kept)

    def test_a_longer_prompt_goes_on_from_it(self) -> None:
        """The first cells are the kept prompt's, the others are imported; both stay kept."""
        with self._keeper() as keeper:
            longer = self._prompt(keeper, seed=5)
            for prompt, text in self._prompts(keeper):
                num_tokens = prompt.plan.num_tokens
                if num_tokens >= longer.plan.num_tokens or prompt.plan.layout != longer.view.layout:
                    continue
                entry, kept = self._kept(keeper, prompt)
                keeper.free(entry)
                reservation = keeper.reserve_from(kept, num_tokens, longer.plan.num_tokens)
                self._import_rest(keeper, reservation, longer, num_tokens)
                self._require_joined(keeper, reservation, (prompt, longer), text)
                entry = keeper.publish(reservation)
                also = keeper.keep(entry)
                self._decode_on(keeper, entry)
                keeper.free(entry)
                for _ in range(2):
                    self._require_again(keeper, also, (prompt, longer), f"{text}, kept")
                    self._require_again(keeper, kept, (prompt, prompt), f"{text}, gone on from")
                keeper.evict(kept)
                keeper.evict(also)

    def test_a_part_is_given_whole_or_not_at_all(self) -> None:
        """Up to any position: every live cell of a prompt that ends there, or a refusal."""
        with self._keeper() as keeper:
            for prompt, text in self._prompts(keeper):
                num_tokens = prompt.plan.num_tokens
                entry, kept = self._kept(keeper, prompt)
                keeper.free(entry)
                require(keeper.can_reuse(kept, num_tokens), f"{text}: not even all of it")
                for positions in range(1, num_tokens):
                    reserve = partial(keeper.reserve_from, kept, positions, positions)
                    if not keeper.can_reuse(kept, positions):
                        refused(f"{text}: positions [0, {positions})", reserve)
                        continue
                    for layer in prompt.plan.layers:
                        first = live_window(layer, positions)[0]
                        there = first >= live_window(layer, num_tokens)[0]
                        require(there, f"{text}: {layer.name} never had position {first}")
                    reservation = reserve()
                    self._require_joined(keeper, reservation, (prompt, prompt), text)
                    keeper.free(reservation)
                for positions in (-1, 0, num_tokens + 1):
                    require(not keeper.can_reuse(kept, positions), f"{text}: {positions} of it")
                shorter = partial(keeper.reserve_from, kept, num_tokens, num_tokens - 1)
                refused("a shorter prompt", shorter)
                keeper.evict(kept)

    def test_what_is_kept_is_not_imported_over(self) -> None:
        with self._keeper() as keeper:
            prompt = self._prompt(keeper)
            entry, kept = self._kept(keeper, prompt)
            keeper.free(entry)
            reservation = keeper.reserve_from(kept, prompt.plan.num_tokens, prompt.plan.num_tokens)
            other = self._prompt(keeper, seed=6)
            for copy in other.copies():
                begin = partial(keeper.begin_import, reservation, other.view, [copy])
                refused("a copy over kept cells", begin)
            require(landed_cells(keeper, reservation, prompt) == prompt.cells(), "it was made")
            keeper.free(reservation)
            keeper.evict(kept)

    def test_only_a_published_entry_is_kept_and_only_while_it_is_new(self) -> None:
        with self._keeper() as keeper:
            reservation = self._reserved(keeper, self._prompt(keeper))
            early = Entry(reservation.lane, reservation.num_tokens, reservation.serial)
            refused("keeping an entry early", lambda: keeper.keep(early))
            entry = keeper.publish(reservation)
            if keeper.caps.decodes:
                self._decode(keeper, entry, 1)
                refused("keeping what was decoded", lambda: keeper.keep(entry))
            keeper.free(entry)
            refused("keeping what was freed", lambda: keeper.keep(entry))
            require(keeper.kept_nbytes == 0, "a refused call kept something")

    def test_what_was_evicted_is_refused(self) -> None:
        with self._keeper() as keeper:
            prompt = self._prompt(keeper)
            serials = set()
            for _ in range(2):
                entry, kept = self._kept(keeper, prompt)
                serials.add(kept.serial)
                keeper.evict(kept)
                same = landed_cells(keeper, entry, prompt) == prompt.cells()
                require(same, "an eviction changed the entry's own cells")
                keeper.free(entry)
                num_tokens = kept.num_tokens
                refused("evicting again", partial(keeper.evict, kept))
                refused("asking for it", partial(keeper.can_reuse, kept, num_tokens))
                reserve = partial(keeper.reserve_from, kept, num_tokens, num_tokens)
                refused("going on from it", reserve)
            require(len(serials) == 2, "a serial came again")

    def test_lanes_are_all_there_beside_what_is_kept(self) -> None:
        """With as much kept as it may, each lane can be reserved; then none more, kept or not."""
        with self._keeper() as keeper:
            prompt = self._prompt(keeper)
            all_kept: list[Kept] = []
            while keeper.kept_nbytes <= keeper.keeps_nbytes:
                entry, kept = self._kept(keeper, prompt)
                all_kept.append(kept)
                keeper.free(entry)
            keeper.evict(all_kept.pop(0))
            require(bool(all_kept), "it keeps no entry within its bound")
            held = [self._reserved(keeper, prompt) for _ in range(keeper.caps.max_lanes)]
            require(len({each.lane for each in held}) == len(held), f"one lane twice: {held}")
            num_tokens = prompt.plan.num_tokens
            reserve = partial(keeper.reserve_from, all_kept[0], num_tokens, num_tokens)
            refused("a lane above the last", reserve, WouldBlock)
            for each in held:
                keeper.free(each)
            for kept in all_kept:
                again = self._again(keeper, kept)
                require(landed_cells(keeper, again, prompt) == prompt.cells(), f"{kept} changed")
                keeper.free(again)
                keeper.evict(kept)

    # What the checks are made of.

    @contextmanager
    def _keeper(self) -> Iterator[Keeper]:
        with self._decoder() as decoder:
            if not isinstance(decoder, KeepsEntries):
                raise AssertionError("the decoder keeps no entries")
            yield cast(Keeper, decoder)

    def _kept(self, keeper: Keeper, prompt: Prompt) -> tuple[Entry, Kept]:
        entry = keeper.publish(self._reserved(keeper, prompt))
        return entry, keeper.keep(entry)

    def _again(self, keeper: Keeper, kept: Kept) -> Entry:
        """An entry of the same prompt."""
        return keeper.publish(keeper.reserve_from(kept, kept.num_tokens, kept.num_tokens))

    def _rows(self, keeper: Keeper, entry: Entry) -> list[bytes]:
        if not keeper.caps.decodes:
            return []
        return [self._decode(keeper, entry, token) for token in TOKENS]

    def _decode_on(self, keeper: Keeper, entry: Entry) -> None:
        room = self.context - entry.num_tokens - 2 * len(TOKENS)
        for _ in range(min(room, self.decoded) if keeper.caps.decodes else 0):
            self._decode(keeper, entry, 1)

    def _import_rest(
        self, keeper: Keeper, reservation: Reservation, prompt: Prompt, start: int
    ) -> None:
        rest = Span(0, len(prompt.plan.layers), start, prompt.plan.num_tokens)
        fenced(keeper.begin_import(reservation, prompt.view, prompt.copies(rest)))

    def _require_again(
        self, keeper: Keeper, kept: Kept, prompts: tuple[Prompt, Prompt], text: str
    ) -> None:
        """It comes back as the cells of these prompts, and decodes."""
        again = self._again(keeper, kept)
        self._require_joined(keeper, again, prompts, text)
        self._decode_on(keeper, again)
        keeper.free(again)

    def _require_joined(
        self, keeper: Keeper, held: Held, prompts: tuple[Prompt, Prompt], text: str
    ) -> None:
        """Its cells are the first prompt's up to that one's end, then the second's."""
        first, then = prompts
        middle = min(first.plan.num_tokens, held.num_tokens)
        for prompt, start, stop in ((first, 0, middle), (then, middle, held.num_tokens)):
            for copy in _live_copies(prompt, held.num_tokens, start, stop):
                wanted = region_bytes(prompt.view.buffer, copy.source)
                got = bytes(keeper.read(held, prompt.plan.layout, copy))
                require(got == wanted, f"{text}: {held} differs at {copy}")


def _live_copies(prompt: Prompt, num_tokens: int, start: int, stop: int) -> Iterator[Copy]:
    """The cells of [start, stop) that are live in a prompt of `num_tokens`."""
    for layer in range(len(prompt.plan.layers)):
        first = max(start, live_window(prompt.plan.layers[layer], num_tokens)[0])
        if first < stop:
            yield from prompt.copies(Span(layer, layer + 1, first, stop))
