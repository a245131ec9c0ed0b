"""What is decoded or computed on top of a kept entry has the bits of a cold run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends import cpu as cpu_backend
from headrace.backends.base import ContinuesKept, Entry, KeepsEntries, Kept, Reservation
from headrace.backends.cpu import CpuDecoder
from headrace.backends.storages import tails_nbytes
from headrace.engine.lanes import lane_nbytes
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_config
from headrace.errors import Cancelled, LocalProtocolError, Refused, WouldBlock
from headrace.geometry import Sliding
from headrace.messages import Prefill
from headrace.plan import compile_plan
from tests.e2e.families import (
    CONTEXT,
    FAMILIES,
    WINDOW,
    FakeSink,
    decoder_of,
    directory_of,
    hand_off,
    make_prompt,
    make_sink,
    options,
    slot_view,
    source_of,
)

NUM_TOKENS = 43
STEPS = (5, 9, 3)
HYBRID = ("gemma3", "gemma4_shared", "mistral", "exaone4")
BOUND = 4e-6
BOUNDS = {"gemma4": 1.5e-5, "gemma4_shared": 1.5e-5, "gemma4_k_eq_v": 4e-5}
"""Of the difference that one cut makes in float32 logits, by the largest logit of the row.

Measured were, over three prompts each of 17, 43 and 90 tokens and seven cuts, at most 1.9e-6, but
for gemma4 and gemma4_shared 4.6e-6 and for gemma4_k_eq_v 1.5e-5.
"""


def entry_nbytes(family: str) -> int:
    """Bytes that one kept entry takes at most."""
    facts = manifest(
        load_config(directory_of(family)), directory_of(family), "decoder", "float32", CONTEXT
    )
    return lane_nbytes(facts.layers, CONTEXT) + tails_nbytes(facts.layers, CONTEXT)


@contextmanager
def decoder_that_keeps(family: str, entries: int = 2, lanes: int = 2) -> Iterator[CpuDecoder]:
    decoder = cpu_backend.open(
        {
            "model": str(directory_of(family)),
            "lanes": lanes,
            "context": CONTEXT,
            "keep_nbytes": entries * entry_nbytes(family),
        }
    )
    yield decoder
    decoder._lanes.check_integrity()
    decoder.close()


def published(decoder: CpuDecoder, family: str, tokens: Sequence[int], **asked: Any) -> Entry:
    given = options("whole", len(tokens), **asked)
    return hand_off(source_of(family), decoder, tokens, given)[1]


def decode(decoder: CpuDecoder, entry: Entry, tokens: Sequence[int] = STEPS) -> list[bytes]:
    return [decoder.decode_step([(entry, token)])[0].tobytes() for token in tokens]


def imported(decoder: CpuDecoder, reservation: Reservation, sink: FakeSink) -> Entry:
    """Import what the sink holds and publish."""
    slot = slot_view(sink.buffer, sink.plan.layout)
    decoder.begin_import(reservation, slot, sink.plan.copies(sink.plan.whole()))
    return decoder.publish(reservation)


def cells_of(decoder: CpuDecoder, held: Entry | Reservation) -> dict[tuple[int, int], bytes]:
    """All live cells of the prompt, by (layer, part)."""
    plan = compile_plan(decoder.manifest(), "head_major", held.num_tokens, CONTEXT)
    copies = plan.copies(plan.whole())
    return {(c.layer, c.part): bytes(decoder.read(held, "head_major", c)) for c in copies}


def storage_of(decoder: CpuDecoder, held: Entry | Reservation) -> int:
    return decoder._lanes._storages._used_by(held.lane).number


def test_the_cpu_decoder_keeps_and_its_engine_continues() -> None:
    with decoder_that_keeps("llama") as decoder:
        assert isinstance(decoder, KeepsEntries)
        assert decoder.keeps_nbytes == 2 * entry_nbytes("llama")
        engine = decoder.prefill_engine()
        assert isinstance(engine, ContinuesKept)
        assert engine.manifest().prefix == "own_cache"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_identical_prompt_needs_no_prefill(family: str) -> None:
    """Its decode is the first one's: after that was freed, and while it decodes past its window."""
    for num_tokens in (WINDOW - 1, NUM_TOKENS):
        with decoder_that_keeps(family) as decoder:
            first = published(decoder, family, make_prompt(num_tokens))
            kept = decoder.keep(first)
            cells, wanted = cells_of(decoder, first), decode(decoder, first)
            decode(decoder, first, range(10, 10 + 2 * WINDOW))
            beside = decoder.reserve_from(kept, num_tokens, num_tokens)
            assert storage_of(decoder, beside) != kept.storage, "it is in use"
            assert cells_of(decoder, beside) == cells
            again = decoder.publish(beside)
            rows = []
            for token in STEPS:
                pair = decoder.decode_step([(first, 7), (again, token)])
                rows.append(pair[1].tobytes())
            assert rows == wanted
            decoder.free(first)
            decoder.free(again)
            for _ in range(2):
                last = decoder.reserve_from(kept, num_tokens, num_tokens)
                assert storage_of(decoder, last) == kept.storage, "nobody else uses it"
                assert cells_of(decoder, last) == cells
                entry = decoder.publish(last)
                assert decode(decoder, entry) == wanted
                decode(decoder, entry, range(20, 20 + WINDOW))
                decoder.free(entry)


def continued(
    decoder: CpuDecoder, kept: Kept, tokens: Sequence[int], asked: Prefill
) -> tuple[FakeSink, Entry]:
    """Prefill what comes after the kept positions on top of them, import it and publish."""
    engine = decoder.prefill_engine()
    sink = make_sink(engine.manifest(), decoder.manifest(), asked)
    reservation = decoder.reserve_from(kept, asked.start, len(tokens))
    engine.continue_from(kept)
    engine.prefill_stream(tokens, sink, asked.start)
    return sink, imported(decoder, reservation, sink)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("in_place", [True, False])
def test_a_longer_prompt_goes_on_from_a_kept_one(family: str, in_place: bool) -> None:
    """Cells, logits and decode of a cold run with the same cut: below, at, above the window."""
    tokens = make_prompt(NUM_TOKENS)
    for start in (3, WINDOW - 1, WINDOW, WINDOW + 1, 30, NUM_TOKENS - 1):
        with decoder_that_keeps(family) as decoder:
            asked: dict[str, Any] = {"prefill_chunk": 11, "cuts": (start,)}
            cold = published(decoder, family, tokens, **asked)
            cells, wanted = cells_of(decoder, cold), decode(decoder, cold)
            decoder.free(cold)
            short = published(decoder, family, tokens[:start], prefill_chunk=11)
            kept = decoder.keep(short)
            decode(decoder, short, range(10, 10 + WINDOW + 3))
            if in_place:
                decoder.free(short)
            given = options("streamed", NUM_TOKENS, start=start, **asked)
            sink, entry = continued(decoder, kept, tokens, given)
            assert (storage_of(decoder, entry) == kept.storage) is in_place
            assert cells_of(decoder, entry) == cells
            assert decode(decoder, entry) == wanted
            assert sink.logits == source_logits(family, tokens, **asked)


def source_logits(family: str, tokens: Sequence[int], **asked: Any) -> bytes | None:
    source = source_of(family)
    given = options("whole", len(tokens), **asked)
    sink = make_sink(source.manifest(), decoder_of(family).manifest(), given)
    source.prefill_stream(tokens, sink, given.start)
    return sink.logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_cut_changes_no_logit_by_more_than_the_bound(family: str) -> None:
    """Against a one-pass run: what rounding makes of it, for any place of the cut."""
    tokens = make_prompt(NUM_TOKENS)
    wanted = np.frombuffer(source_logits(family, tokens) or b"", np.float32)
    for cut in (1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 30, NUM_TOKENS - 1):
        got = np.frombuffer(source_logits(family, tokens, cuts=(cut,)) or b"", np.float32)
        difference = float(np.abs(got - wanted).max() / np.abs(wanted).max())
        assert difference <= BOUNDS.get(family, BOUND), (family, cut, difference)
        assert got.argmax() == wanted.argmax()


@pytest.mark.parametrize("family", ["llama", *HYBRID])
def test_a_part_of_a_kept_prompt(family: str) -> None:
    """At a piece's end inside it: exact where the sliding layers' rows reach, else refused."""
    tokens = make_prompt(NUM_TOKENS)
    other = [*tokens[:24], *make_prompt(NUM_TOKENS - 24, seed=9)]
    sliding = any(isinstance(layer.kind, Sliding) for layer in source_of(family).manifest().layers)
    with decoder_that_keeps(family, entries=3) as decoder:
        long = published(decoder, family, tokens, prefill_chunk=8)
        kept = decoder.keep(long)
        short = published(decoder, family, tokens[: WINDOW - 1], prefill_chunk=5)
        below = decoder.keep(short)
        before = cells_of(decoder, long), cells_of(decoder, short)
        decoder.free(short)
        for start in (8, 16, 24):
            assert decoder.can_reuse(kept, start) is not sliding
        cases = [
            (below, 5, 5),
            (below, 10, 5),
            *([] if sliding else [(kept, 16, 8), (kept, 24, 8)]),
        ]
        for base, start, chunk in cases:
            assert decoder.can_reuse(base, start)
            asked: dict[str, Any] = {"start": start, "cuts": (start,), "prefill_chunk": chunk}
            given = options("streamed", NUM_TOKENS, **asked)
            sink, entry = continued(decoder, base, other, given)
            assert storage_of(decoder, entry) != base.storage, "its rows beyond must stay"
            got = cells_of(decoder, entry), decode(decoder, entry)
            decoder.free(entry)
            cold = published(decoder, family, other, cuts=(start,), prefill_chunk=chunk)
            assert got == (cells_of(decoder, cold), decode(decoder, cold))
            assert sink.logits == source_logits(family, other, cuts=(start,), prefill_chunk=chunk)
            decoder.free(cold)
        again = decoder.reserve_from(below, WINDOW - 1, WINDOW - 1)
        assert (cells_of(decoder, long), cells_of(decoder, again)) == before


@pytest.mark.parametrize("family", HYBRID)
def test_rows_of_a_window_that_are_gone_are_refused(family: str) -> None:
    with decoder_that_keeps(family) as decoder:
        kept = decoder.keep(published(decoder, family, make_prompt(NUM_TOKENS)))
        for positions in (1, WINDOW - 1, WINDOW, NUM_TOKENS - 1, NUM_TOKENS + 1, 0, -1):
            assert not decoder.can_reuse(kept, positions)
            with pytest.raises(LocalProtocolError, match=rf"positions \[0, {positions}\)"):
                decoder.reserve_from(kept, positions, NUM_TOKENS + 5)
            engine = decoder.prefill_engine()
            if 0 < positions < NUM_TOKENS:
                asked = options("whole", NUM_TOKENS, start=positions, cuts=(positions,))
                sink = make_sink(engine.manifest(), decoder.manifest(), asked)
                engine.continue_from(kept)
                with pytest.raises(LocalProtocolError, match="are not enough"):
                    engine.prefill_stream(make_prompt(NUM_TOKENS), sink, positions)
        with pytest.raises(LocalProtocolError, match="for a prompt of 42"):
            decoder.reserve_from(kept, NUM_TOKENS, NUM_TOKENS - 1)


def test_a_conversation_shares_one_memory() -> None:
    """Each turn goes on in place; the earlier ones stay kept there, with their bytes."""
    family, tokens = "gemma3", make_prompt(90)
    with decoder_that_keeps(family, entries=2, lanes=1) as decoder:
        entry = published(decoder, family, tokens[:10])
        turns = [decoder.keep(entry)]
        cells = [cells_of(decoder, entry)]
        for stop in (31, 60, 90):
            decode(decoder, entry)
            decoder.free(entry)
            cuts = tuple(kept.num_tokens for kept in turns)
            asked = options("streamed", stop, start=cuts[-1], cuts=cuts)
            _, entry = continued(decoder, turns[-1], tokens[:stop], asked)
            turns.append(decoder.keep(entry))
            cells.append(cells_of(decoder, entry))
        assert {kept.storage for kept in turns} == {turns[0].storage}
        decoder.free(entry)
        counts = decoder.statistics()
        assert (counts["kept"], counts["storages_kept"]) == (4, 1)
        lane = turns[0].storage_nbytes
        assert decoder.kept_nbytes == lane + sum(kept.nbytes for kept in turns)
        for kept, wanted in zip(turns, cells, strict=True):
            again = decoder.reserve_from(kept, kept.num_tokens, kept.num_tokens)
            assert cells_of(decoder, again) == wanted
            decoder.free(again)


# The engine that goes on from them.


def test_it_computes_only_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    forward = LoadedModel.forward

    def counting(self: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        computed.append(ids.shape[1])
        return forward(self, ids, cache)

    tokens = make_prompt(NUM_TOKENS)
    with decoder_that_keeps("gemma3") as decoder:
        kept = decoder.keep(published(decoder, "gemma3", tokens[:20]))
        engine = decoder.prefill_engine()
        asked = options("whole", NUM_TOKENS, start=20, cuts=(20,))
        monkeypatch.setattr(LoadedModel, "forward", counting)
        for told in (True, False, True):
            if told:
                engine.continue_from(kept)
            sink = make_sink(engine.manifest(), decoder.manifest(), asked)
            engine.prefill_stream(tokens, sink, 20)
            assert computed == [23] if told else [20, 23], "it is told for one attempt only"
            computed.clear()


@pytest.mark.parametrize("how", ["cancelled", "wrong start", "wrong tokens", "asked for all"])
def test_an_attempt_that_ended_otherwise_forgets_it_too(how: str) -> None:
    tokens = make_prompt(NUM_TOKENS)
    with decoder_that_keeps("gemma3") as decoder:
        kept = decoder.keep(published(decoder, "gemma3", tokens[:20]))
        engine = decoder.prefill_engine()
        start = 0 if how == "asked for all" else 20
        asked = options("whole", NUM_TOKENS, start=start, cuts=(20,))
        sink = make_sink(engine.manifest(), decoder.manifest(), asked)
        sink.cancel_at_write = 0 if how == "cancelled" else None
        engine.continue_from(kept)
        given = {"wrong start": (tokens, 21), "wrong tokens": ([], 20)}.get(how, (tokens, start))
        with pytest.raises(Cancelled if how == "cancelled" else LocalProtocolError):
            engine.prefill_stream(given[0], sink, given[1])
        decoder.evict(kept)
        sink = make_sink(engine.manifest(), decoder.manifest(), options("whole", NUM_TOKENS))
        engine.prefill_stream(tokens, sink)
        assert sink.logits == source_logits("gemma3", tokens)


def test_what_was_evicted_is_not_gone_on_from() -> None:
    tokens = make_prompt(NUM_TOKENS)
    with decoder_that_keeps("gemma3") as decoder:
        kept = decoder.keep(published(decoder, "gemma3", tokens[:20]))
        engine = decoder.prefill_engine()
        engine.continue_from(kept)
        decoder.evict(kept)
        asked = options("whole", NUM_TOKENS, start=20, cuts=(20,))
        sink = make_sink(engine.manifest(), decoder.manifest(), asked)
        with pytest.raises(LocalProtocolError, match="not kept"):
            engine.prefill_stream(tokens, sink, 20)


# What it may keep.


def test_only_what_was_not_decoded_can_be_kept() -> None:
    with decoder_that_keeps("llama") as decoder:
        entry = published(decoder, "llama", make_prompt(9))
        kept = decoder.keep(entry)
        decode(decoder, entry)
        with pytest.raises(LocalProtocolError, match="it was decoded"):
            decoder.keep(entry)
        decoder.free(entry)
        with pytest.raises(LocalProtocolError, match="free, not published"):
            decoder.keep(entry)
        assert decoder.can_reuse(kept, 9)


def test_what_is_kept_cannot_be_imported_over() -> None:
    tokens = make_prompt(20)
    source = source_of("gemma3")
    with decoder_that_keeps("gemma3") as decoder:
        short = published(decoder, "gemma3", tokens[:9])
        kept = decoder.keep(short)
        decoder.free(short)
        reservation = decoder.reserve_from(kept, 9, 20)
        sink = make_sink(source.manifest(), decoder.manifest(), options("whole", 20))
        source.prefill_stream(tokens, sink)
        with pytest.raises(LocalProtocolError, match="first 9 positions are there and kept"):
            imported(decoder, reservation, sink)


def test_too_little_to_keep_one_entry_is_refused() -> None:
    least = entry_nbytes("gemma3")
    given = {"model": str(directory_of("gemma3")), "context": CONTEXT}
    with pytest.raises(Refused, match=f"takes {least}; give at least that") as caught:
        cpu_backend.open({**given, "keep_nbytes": least - 1})
    assert caught.value.field == "keep_nbytes"
    decoder = cpu_backend.open({**given, "keep_nbytes": least})
    assert decoder.statistics()["storages"] == 2
    decoder.close()


def test_the_memory_for_kept_entries_is_asked_for_with_the_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(cpu_backend, "require_memory", lambda *given: asked.append(given))
    with decoder_that_keeps("llama", entries=5, lanes=3) as decoder:
        lane = lane_nbytes(decoder.manifest().layers, CONTEXT)
        assert asked == [(8 * lane, "3 lanes and 5 for kept entries")]
        assert decoder.statistics()["nbytes"] == 8 * lane


def test_without_a_memory_a_free_lane_says_what_to_do() -> None:
    with decoder_that_keeps("llama", entries=1, lanes=1) as decoder:
        kept = []
        for seed in range(2):
            entry = published(decoder, "llama", make_prompt(9, seed))
            kept.append(decoder.keep(entry))
            decoder.free(entry)
        assert decoder.kept_nbytes > decoder.keeps_nbytes
        with pytest.raises(LocalProtocolError, match="evict some before reserving"):
            decoder.reserve(9)
        with pytest.raises(LocalProtocolError, match="evict some before reserving"):
            decoder.reserve_from(kept[0], 5, 9)
        again = decoder.reserve_from(kept[1], 9, 9)  # takes its own memory over
        with pytest.raises(WouldBlock):
            decoder.reserve_from(kept[0], 9, 9)
        decoder.free(again)
        decoder.evict(kept[0])
        assert decoder.kept_nbytes <= decoder.keeps_nbytes
        decoder.free(decoder.reserve(9))
