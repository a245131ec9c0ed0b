"""The conformance suite of decoders: what every device's adapter must keep.

Subclass `DecoderConformance` in a test module, give it `make_decoder`, and pytest runs the checks:

    class TestMyDecoder(DecoderConformance):
        def make_decoder(self, lanes: int) -> Decoder:
            return my_backend.open({"model": "...", "lanes": lanes, "context": self.context})

A device with fewer lanes than asked for gives what it has; checks that need two lanes then pass
over what it cannot show. A slot here is host memory filled with finite random elements.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from headrace.backends.base import Decoder, Entry, Fence, Reservation, SlotView
from headrace.errors import HeadraceError, LocalProtocolError, WouldBlock
from headrace.geometry import Layout, check_manifest
from headrace.ids import Span
from headrace.plan import Copy, Plan, Region, compile_plan
from headrace.testing.conformance_engine import require
from headrace.testing.elements import random_elements
from headrace.testing.sinks import region_bytes, row_ranges

FENCE_WITHIN_S = 30.0
_COMPANY = (0, 1, 2, 0, 2, 1, 1, 2)  # how many others decode with an entry, step by step

Held = Reservation | Entry
Cells = dict[tuple[int, int], bytes]


class Prompt:
    """A slot with the cells of one prompt, in one layout: such as the decoder can read back."""

    def __init__(self, decoder: Decoder, layout: Layout, num_tokens: int, context: int, seed: int):
        self.plan: Plan = compile_plan(decoder.manifest(), layout, num_tokens, context)
        self._memory = bytearray(self.plan.slot.nbytes)
        self._exported = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        buffer = memoryview(self._memory)
        rng, coarse = random.Random(seed), not decoder.caps.reads_back
        for copy in self.copies():
            dtype = self.plan.layers[copy.layer].parts[copy.part].dtype
            for begin, end in row_ranges(copy.source):
                buffer[begin:end] = random_elements(dtype, end - begin, rng, coarse=coarse)
        self.view = SlotView(buffer, ctypes.addressof(self._exported), layout)

    def copies(self, span: Span | None = None) -> list[Copy]:
        return self.plan.copies(span or self.plan.whole())

    def cells(self) -> Cells:
        """The bytes of each (layer, part) in the slot."""
        return {(c.layer, c.part): region_bytes(self.view.buffer, c.source) for c in self.copies()}


def state_counts(decoder: Decoder) -> dict[str, int]:
    """A decoder's statistics but for those that only grow."""
    return {name: n for name, n in decoder.statistics().items() if name not in decoder.caps.work}


class DecoderConformance:
    """Checks of one decoder. context: positions of a lane. lengths: prompts. lanes: asked for."""

    context: ClassVar[int] = 64
    lengths: ClassVar[Sequence[int]] = (1, 15, 16, 17, 40)
    lanes: ClassVar[int] = 3

    def make_decoder(self, lanes: int) -> Decoder:
        """A new decoder under test with `lanes` lanes, or as many as the device has."""
        raise NotImplementedError("give make_decoder of the decoder under test")

    def test_its_facts_are_sound(self) -> None:
        with self._decoder() as decoder:
            check_manifest(decoder.manifest(), "decoder")
            require(decoder.manifest() == decoder.manifest(), "the manifest changes")
            require(decoder.caps.ordered_copy, "no ordered copy: an owner refuses to start on it")
            require(1 <= decoder.caps.max_lanes <= self.lanes, f"{decoder.caps.max_lanes} lanes")
            counts = decoder.statistics()
            require(all(type(n) is int for n in counts.values()), f"they are no counts: {counts}")
            work = decoder.caps.work
            require(set(work) <= set(counts), f"statistics are {set(counts)}, caps.work is {work}")

    def test_lanes_are_reserved_once_each(self) -> None:
        with self._decoder() as decoder:
            before = state_counts(decoder)
            held = [decoder.reserve(4) for _ in range(decoder.caps.max_lanes)]
            require(len({h.lane for h in held}) == len(held), f"one lane twice: {held}")
            refused("a lane above the last", lambda: decoder.reserve(4), WouldBlock)
            require(state_counts(decoder) != before, "statistics do not tell what is reserved")
            decoder.free(held[0])
            again = decoder.reserve(5)
            require(again.lane == held[0].lane, f"{again} while lane {held[0].lane} is free")
            require(again != held[0] and again.serial != held[0].serial, "a serial came again")
            for each in (again, *held[1:]):
                decoder.free(each)
            require(state_counts(decoder) == before, "statistics differ when all is free again")

    def test_cells_land_where_they_belong(self) -> None:
        """Whole, by layer, by position, backwards, by the plan's cut: the bytes are the slot's."""
        with self._decoder() as decoder:
            for prompt, text in self._prompts(decoder):
                for how, pieces in _cuttings(prompt):
                    self._soil(decoder, prompt.plan.layout)
                    reservation = decoder.reserve(prompt.plan.num_tokens)
                    for copies in pieces:
                        fenced(decoder.begin_import(reservation, prompt.view, copies))
                    landed = landed_cells(decoder, reservation, prompt)
                    require(landed == prompt.cells(), f"{text}, {how}: other bytes landed")
                    entry = decoder.publish(reservation)
                    landed = landed_cells(decoder, entry, prompt)
                    require(landed == prompt.cells(), f"{text}, {how}: other bytes published")
                    decoder.free(entry)

    def test_a_part_of_a_span_can_be_read(self) -> None:
        with self._decoder() as decoder:
            for prompt, text in self._prompts(decoder):
                reservation = self._reserved(decoder, prompt)
                for copy in prompt.copies():
                    middle = copy.start + (copy.stop - copy.start) // 2
                    if middle == copy.start:
                        continue
                    piece = Span(copy.layer, copy.layer + 1, middle, copy.stop)
                    part = prompt.copies(piece)[copy.part]
                    wanted = region_bytes(prompt.view.buffer, part.source)
                    got = bytes(decoder.read(reservation, prompt.plan.layout, part))
                    require(got == wanted, f"{text}: {piece} reads otherwise")
                decoder.free(reservation)

    def test_neighbours_do_not_touch_each_other(self) -> None:
        """Imports by turns into all lanes, one of which is published: each keeps its own."""
        with self._decoder() as decoder:
            num_lanes = decoder.caps.max_lanes
            layout = decoder.manifest().layouts[0]
            prompts = [
                Prompt(decoder, layout, self.lengths[-1] - at, self.context, seed=at)
                for at in range(num_lanes)
            ]
            published = decoder.publish(self._reserved(decoder, prompts[0]))
            held = [decoder.reserve(prompt.plan.num_tokens) for prompt in prompts[1:]]
            for layer in range(len(prompts[0].plan.layers)):
                for reservation, prompt in zip(held, prompts[1:], strict=True):
                    copies = prompt.copies(Span(layer, layer + 1, 0, prompt.plan.num_tokens))
                    fenced(decoder.begin_import(reservation, prompt.view, copies))
            all_held: list[Held] = [published, *held]
            for each, prompt in zip(all_held, prompts, strict=True):
                same = landed_cells(decoder, each, prompt) == prompt.cells()
                require(same, f"lane {each.lane} holds other bytes than its own")
            for each in all_held:
                decoder.free(each)

    def test_nothing_is_visible_before_it_is_published(self) -> None:
        """An entry made up from a reservation is none, however complete its cells are."""
        with self._decoder() as decoder:
            prompt = self._prompt(decoder)
            reservation = self._reserved(decoder, prompt)
            early = Entry(reservation.lane, reservation.num_tokens, reservation.serial)
            copy, layout = prompt.copies()[0], prompt.plan.layout
            refused("reading an entry early", lambda: decoder.read(early, layout, copy))
            refused("decoding an entry early", lambda: decoder.decode_step([(early, 0)]))
            refused("freeing an entry early", lambda: decoder.free(early))
            entry = decoder.publish(reservation)
            require(entry == early, f"{reservation} was published as {entry}")
            decoder.free(entry)

    def test_what_was_given_back_is_refused(self) -> None:
        """A holder from before is refused for every purpose, also once the lane is held anew."""
        with self._decoder() as decoder:
            prompt = self._prompt(decoder)
            reservation = self._reserved(decoder, prompt)
            entry = decoder.publish(reservation)
            self._refused_for_all("published before", decoder, prompt, reservation)
            decoder.free(entry)
            for stale in (reservation, entry):
                self._refused_for_all("freed before", decoder, prompt, stale)
            fresh = [self._reserved(decoder, prompt) for _ in range(decoder.caps.max_lanes)]
            for stale in (reservation, entry):
                self._refused_for_all("held by another now", decoder, prompt, stale)
            for each in fresh:
                same = landed_cells(decoder, each, prompt) == prompt.cells()
                require(same, "a refused call changed what another holds")
                decoder.free(each)

    def test_a_copy_from_outside_the_slot_is_refused(self) -> None:
        with self._decoder() as decoder:
            prompt = self._prompt(decoder)
            reservation = self._reserved(decoder, prompt)
            copy = prompt.copies()[0]
            nbytes = copy.source.row_nbytes
            far = len(prompt.view.buffer) - nbytes + 1
            for region in (Region(far, 1, nbytes, 0), Region(-1, 1, nbytes, 0)):
                stray = copy._replace(source=region)
                begin = partial(decoder.begin_import, reservation, prompt.view, [stray])
                refused(f"a copy from {region}", begin)
            same = landed_cells(decoder, reservation, prompt) == prompt.cells()
            require(same, "a refused copy was made")
            decoder.free(reservation)

    def test_decoding_depends_on_the_entry_alone(self) -> None:
        """Not on the lane, on what it held before, on neighbours that decode or are imported."""
        with self._decoder() as decoder:
            if not decoder.caps.decodes:
                refused("a step of a decoder that decodes nothing", lambda: _step(decoder, []))
                return
            vocab_size = decoder.manifest().vocab_size
            for prompt, text in self._prompts(decoder):
                wanted = None
                for occupied in range(decoder.caps.max_lanes):
                    others = [
                        self._reserved(decoder, self._prompt(decoder, seed=90 + at))
                        for at in range(occupied)
                    ]
                    entry = decoder.publish(self._reserved(decoder, prompt))
                    rows = [self._decode(decoder, entry, token) for token in (1, 2, 0)]
                    for row in rows:
                        require(len(row) == 4 * vocab_size, f"{text}: a row of {len(row)} bytes")
                    wanted = wanted or rows
                    require(rows == wanted, f"{text}: lane {entry.lane} decodes otherwise")
                    decoder.free(entry)
                    for other in others:
                        decoder.free(other)
                self._decode_among_others(decoder, prompt, wanted or [], text)

    def test_a_batch_keeps_its_rows_apart(self) -> None:
        """What others do in a batch, come, go or decode, changes no bit of an entry's logits."""
        with self._decoder() as decoder:
            if decoder.caps.decode_batch == 1:
                return
            for prompt, text in self._prompts(decoder):
                alone, beside = (
                    self._decode_in_company(decoder, prompt, company)
                    for company in ((0,) * len(_COMPANY), _COMPANY)
                )
                require(alone == beside, f"{text}: others of a batch change what is decoded")

    def test_a_step_is_taken_by_published_entries_only(self) -> None:
        with self._decoder() as decoder:
            if not decoder.caps.decodes:
                return
            vocab_size = decoder.manifest().vocab_size
            prompt = self._prompt(decoder)
            entry = decoder.publish(self._reserved(decoder, prompt))
            first = self._decode(decoder, entry, 1)
            refused("an entry twice in a step", lambda: _step(decoder, [(entry, 1), (entry, 1)]))
            for token in (vocab_size, -1):
                refused(f"token {token}", partial(_step, decoder, [(entry, token)]))
            again = decoder.publish(self._reserved_elsewhere(decoder, entry, prompt))
            require(self._decode(decoder, again, 1) == first, "a refused step left something")
            decoder.free(again)
            refused("a freed entry", lambda: _step(decoder, [(again, 1)]))

    # What the checks are made of.

    @contextmanager
    def _decoder(self) -> Iterator[Decoder]:
        decoder = self.make_decoder(self.lanes)
        try:
            yield decoder
        finally:
            decoder.close()

    def _prompt(self, decoder: Decoder, seed: int = 0) -> Prompt:
        layout = decoder.manifest().layouts[0]
        return Prompt(decoder, layout, self.lengths[-1], self.context, seed)

    def _prompts(self, decoder: Decoder) -> Iterator[tuple[Prompt, str]]:
        """Longest first, so that a lane has held more before."""
        for layout in decoder.manifest().layouts:
            for num_tokens in sorted(self.lengths, reverse=True):
                prompt = Prompt(decoder, layout, num_tokens, self.context, seed=num_tokens)
                yield prompt, f"{num_tokens} tokens, {layout}"

    def _reserved(self, decoder: Decoder, prompt: Prompt) -> Reservation:
        reservation = decoder.reserve(prompt.plan.num_tokens)
        fenced(decoder.begin_import(reservation, prompt.view, prompt.copies()))
        return reservation

    def _soil(self, decoder: Decoder, layout: Layout) -> None:
        """Fill all lanes with other cells, which must not pass for those of the next holder."""
        prompt = Prompt(decoder, layout, self.lengths[-1], self.context, seed=99)
        for each in [self._reserved(decoder, prompt) for _ in range(decoder.caps.max_lanes)]:
            decoder.free(each)

    def _reserved_elsewhere(self, decoder: Decoder, entry: Entry, prompt: Prompt) -> Reservation:
        """In another lane if there is one, else in the entry's own after it is freed."""
        if decoder.caps.max_lanes == 1:
            decoder.free(entry)
        return self._reserved(decoder, prompt)

    def _refused_for_all(self, when: str, decoder: Decoder, prompt: Prompt, stale: Held) -> None:
        copies, layout = prompt.copies(), prompt.plan.layout
        refused(f"reading what was {when}", lambda: decoder.read(stale, layout, copies[0]))
        refused(f"freeing what was {when}", lambda: decoder.free(stale))
        if isinstance(stale, Reservation):
            refused(f"publishing what was {when}", lambda: decoder.publish(stale))
            refused(
                f"importing into what was {when}",
                lambda: decoder.begin_import(stale, prompt.view, copies),
            )
        else:
            refused(f"decoding what was {when}", lambda: decoder.decode_step([(stale, 0)]))

    def _decode(self, decoder: Decoder, entry: Entry, token: int) -> bytes:
        (row,) = _step(decoder, [(entry, token)])
        return row

    def _decode_among_others(
        self, decoder: Decoder, prompt: Prompt, wanted: list[bytes], text: str
    ) -> None:
        """By turns and in one step with a neighbour, while a third lane is imported into."""
        if decoder.caps.max_lanes < 2:
            return
        entry = decoder.publish(self._reserved(decoder, prompt))
        beside = self._prompt(decoder, seed=77)
        other = decoder.publish(self._reserved(decoder, beside))
        rows = []
        # In a batch the first one has the row that it would have alone.
        at = 1 if decoder.caps.decode_batch == 1 else 0
        for token in (1, 2, 0):
            third = self._reserved(decoder, beside) if decoder.caps.max_lanes > 2 else None
            fed = [(other, 1)]
            fed.insert(at, (entry, token))
            rows.append(_step(decoder, fed)[at])
            if third is not None:
                decoder.free(third)
        require(rows == wanted, f"{text}: a neighbour changes what is decoded")
        decoder.free(entry)
        decoder.free(other)

    def _decode_in_company(
        self, decoder: Decoder, prompt: Prompt, company: Sequence[int]
    ) -> list[bytes]:
        """An entry's rows, step by step with so many others; who leaves makes room for another."""
        entry = decoder.publish(self._reserved(decoder, prompt))
        others: list[Entry] = []
        rows = []
        for step, count in enumerate(company[: self.context - prompt.plan.num_tokens]):
            while len(others) > min(count, decoder.caps.max_lanes - 1):
                decoder.free(others.pop(0))
            while len(others) < min(count, decoder.caps.max_lanes - 1):
                other = self._reserved(decoder, self._prompt(decoder, seed=50 + step))
                others.append(decoder.publish(other))
            fed = [(entry, step % 3), *((other, 1) for other in others)]
            rows.append(_step(decoder, fed)[0])
        for each in (entry, *others):
            decoder.free(each)
        return rows


def _step(decoder: Decoder, active: Sequence[tuple[Entry, int]]) -> list[bytes]:
    return [bytes(row.cast("B")) for row in decoder.decode_step(active)]


def refused(
    what: str,
    act: Callable[[], object],
    kind: type[HeadraceError] = LocalProtocolError,
) -> None:
    """Require that `act` raises an error of this kind."""
    try:
        act()
    except kind:
        return
    raise AssertionError(f"{what} was not refused")


def fenced(fence: Fence) -> None:
    """Wait for a fence."""
    deadline_s = time.monotonic() + FENCE_WITHIN_S
    while not fence.done():
        require(time.monotonic() < deadline_s, f"no fence within {FENCE_WITHIN_S} s")


def landed_cells(decoder: Decoder, held: Held, prompt: Prompt) -> Cells:
    """What the decoder holds of each (layer, part)."""
    layout = prompt.plan.layout
    return {(c.layer, c.part): bytes(decoder.read(held, layout, c)) for c in prompt.copies()}


def _cuttings(prompt: Prompt) -> Iterator[tuple[str, list[list[Copy]]]]:
    """Ways to import all cells, each as batches of copies."""
    plan = prompt.plan
    layers = range(len(plan.layers))
    by_layer = [prompt.copies(Span(at, at + 1, 0, plan.num_tokens)) for at in layers]
    by_position = [
        prompt.copies(Span(0, len(layers), at, min(at + 5, plan.num_tokens)))
        for at in range(0, plan.num_tokens, 5)
    ]
    pieces = plan.cut(plan.whole(), max(1, plan.nbytes // 7))
    yield "whole", [prompt.copies()]
    yield "by layer", by_layer
    yield "backwards", by_layer[::-1]
    yield "by position", by_position
    yield "cut", [prompt.copies(piece) for piece in pieces]
    yield "copy by copy", [[copy] for copy in prompt.copies()]
