"""What a source can say wrong in whole messages: cells, order, leases, attempts, bounds.

Each function yields names and the messages of one attempt, in order; the last is the wrong one
unless the function says otherwise. All suppose that nothing was told before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias

import msgspec

from headrace.geometry import Manifest
from headrace.ids import AttemptId, Span
from headrace.messages import (
    MAX_PROGRESS,
    MAX_SPANS,
    Attached,
    Computing,
    Failed,
    FromSource,
    Incompatible,
    Prefill,
    Progress,
    Ready,
    Released,
    SourceFinal,
)
from headrace.plan import Plan

AttemptMessage: TypeAlias = Computing | Progress | SourceFinal | Failed | Released
Identity: TypeAlias = tuple[AttemptId, int, int]  # attempt, slot, generation
Told: TypeAlias = Iterator[tuple[str, tuple[FromSource, ...]]]

_FAR = 1 << 20  # from an attempt or a slot that is there to one that is not
_EDGE = 9  # slots in a row, so that one of them is the first that is not there
_WILD_NS = (1 << 64) - 1


class Voice:
    """The messages of one attempt; those that tell spans carry as many digests as were asked."""

    def __init__(self, plan: Plan, prefill: Prefill, first: Literal["logits", "token"]) -> None:
        self.plan = plan
        self.prefill = prefill
        self.first = first
        self.whole = plan.whole()
        self.cells = [
            Span(layer, layer + 1, at, at + 1)
            for layer, (lo, hi) in enumerate(plan.windows)
            for at in islice(range(lo, hi), 3 * MAX_SPANS)
        ]
        self.cell = self.cells[0]
        self.moves_nothing = [
            Span(layer, layer + 1, 0, lo) for layer, (lo, _) in enumerate(plan.windows) if lo
        ]

    @property
    def identity(self) -> Identity:
        return self.prefill.attempt, self.prefill.slot, self.prefill.generation

    @property
    def other_first(self) -> Literal["logits", "token"]:
        """The form of final that the source's manifest has not."""
        return "token" if self.first == "logits" else "logits"

    def progress(self, *spans: Span, digests: tuple[int, ...] | None = None) -> Progress:
        stamps = digests if digests is not None else (0,) * len(spans) * self.prefill.digest
        return Progress(*self.identity, spans, stamps, 0, 0, 0)

    def computing(self) -> Computing:
        return Computing(*self.identity)

    def final(self, **changes: Any) -> SourceFinal:
        told = SourceFinal(*self.identity, self.first, 0, 0, 0)
        return msgspec.structs.replace(told, **changes)

    def failed(self) -> Failed:
        return Failed(*self.identity, "engine")

    def released(self) -> Released:
        return Released(*self.identity)

    def all_but_one(self) -> tuple[Span, ...]:
        """Spans of all cells but the last one."""
        last = max(layer for layer, (lo, hi) in enumerate(self.plan.windows) if lo < hi)
        stop = self.plan.num_tokens
        rest = (Span(0, last, 0, stop),) if last else ()
        return (*rest, Span(last, last + 1, 0, stop - 1)) if stop > 1 else rest


def _outside(voice: Voice) -> dict[str, Span]:
    """Spans that are no rectangle, or reach out of the model or the prompt."""
    layers, n = len(voice.plan.layers), voice.plan.num_tokens
    return {
        "a layer beyond": Span(0, layers + 1, 0, n),
        "only a layer beyond": Span(layers, layers + 1, 0, n),
        "a layer below zero": Span(-1, layers, 0, n),
        "only layers below zero": Span(-2, -1, 0, n),
        "a position beyond the prompt": Span(0, layers, 0, n + 1),
        "only a position beyond": Span(0, layers, n, n + 1),
        "a position below zero": Span(0, layers, -1, n),
        "only positions below zero": Span(0, layers, -n, 0),
        "layers and positions beyond": Span(layers, layers + 2, n, n + 2),
        "no layer": Span(0, 0, 0, n),
        "no position": Span(0, layers, 0, 0),
        "no position at the end": Span(0, layers, n, n),
        "nothing": Span(0, 0, 0, 0),
        "layers reversed": Span(layers, 0, 0, n),
        "positions reversed": Span(0, layers, n, 0),
        "both reversed": Span(layers, 0, n, 0),
        "layers far beyond": Span(1 << 62, (1 << 63) - 1, 0, n),
        "all that can be said": Span(0, (1 << 64) - 1, 0, (1 << 64) - 1),
    }


def geometry(voice: Voice) -> Told:
    good = [cell for cell in voice.cells if cell != voice.cell][: MAX_SPANS - 1]
    full = len(good) == MAX_SPANS - 1
    for name, span in _outside(voice).items():
        yield f"geometry: {name}", (voice.progress(span),)
        yield (
            f"geometry: all cells, and then {name}",
            (
                voice.progress(voice.whole),
                voice.progress(span),
            ),
        )
        for at in (0, MAX_SPANS // 2, MAX_SPANS - 1) if full else ():
            spans = (*good[:at], span, *good[at:])
            yield f"geometry: {name} as number {at} of 64", (voice.progress(*spans),)
    layer, _, lo, _ = voice.cell
    hi = voice.plan.windows[layer][1]
    last = Span(layer, layer + 1, hi - 1, hi)
    row = Span(voice.cell.layer_start, voice.cell.layer_stop, 0, voice.plan.num_tokens)
    column = Span(0, len(voice.plan.layers), voice.cell.start, voice.cell.stop)
    for name, (one, other) in {
        "a cell": (voice.cell, voice.cell),
        "all cells": (voice.whole, voice.whole),
        "the first of all cells": (voice.whole, voice.cell),
        "the last of a layer": (voice.whole, last),
        "where two runs meet": (Span(layer, layer + 1, 0, lo + 1), Span(layer, layer + 1, lo, hi)),
        "a cell and then with all": (voice.cell, voice.whole),
        "where a row crosses a column": (row, column),
    }.items():
        yield f"twice: {name}, in one message", (voice.progress(one, other),)
        yield f"twice: {name}, in two messages", (voice.progress(one), voice.progress(other))
    if full:
        yield "twice: the last of 64", (voice.progress(*good, good[0]),)
        yield "twice: 64 of the message before", (voice.progress(*good), voice.progress(*good))


def order(voice: Voice) -> Told:
    whole, final = voice.progress(voice.whole), voice.final()
    rest = voice.all_but_one()
    yield "order: the final first", (final,)
    yield "order: the final after a word", (voice.computing(), final)
    if rest:
        yield "order: the final with a cell missing", (voice.progress(*rest), final)
    if voice.moves_nothing:
        only = voice.progress(*voice.moves_nothing[:MAX_SPANS])
        yield "order: the final after spans without cells", (only, final)
        yield "order: spans without cells after the final", (whole, final, only)
    yield "order: cells after the final", (whole, final, voice.progress(voice.cell))
    yield "order: all cells again after the final", (whole, final, whole)
    yield "order: a second final", (whole, final, final)
    yield "order: a word after the final", (whole, final, voice.computing())
    yield "order: a failure after the final", (whole, final, voice.failed())
    other = voice.other_first
    yield f"first: a {other} that the manifest has not", (whole, voice.final(first=other))
    yield "first: a token before any cell", (voice.final(first="token", token=1),)


def completed_then_late(voice: Voice) -> Told:
    """All is told and the lease given back: what is said of it afterwards is nobody's any more."""
    for name, message in _last_words(voice):
        yield f"order: {name} after the release", (*completed(voice), message)
    whole, other = voice.progress(voice.whole), voice.other_first
    yield "order: all cells again after the release", (*completed(voice), whole)
    wrong = voice.final(first=other)
    yield (
        f"order: a {other} that the manifest has not after the release",
        (
            *completed(voice),
            wrong,
        ),
    )


def completed_then_stale(voice: Voice) -> Told:
    attempt, slot, generation = voice.identity
    for name, message in _last_words(voice):
        for lease, its in {
            "the next slot": (slot + 1, generation),
            "the next generation": (slot, generation + 1),
        }.items():
            wrong = _of(message, attempt, *its)
            yield f"order: {name} of {lease} after the release", (*completed(voice), wrong)


def completed(voice: Voice) -> tuple[AttemptMessage, ...]:
    """A whole attempt, as it should be told."""
    return voice.progress(voice.whole), voice.final(), voice.released()


def bounds(voice: Voice) -> Told:
    for name, spans, digests in (
        ("a digest without a span", (voice.whole,), (0, 0)),
        ("a span without a digest", voice.cells[:2], (0,)),
    ):
        if len(digests) != len(spans):
            yield f"digests: {name}", (voice.progress(*spans, digests=digests),)
    if voice.prefill.digest:
        yield "digests: none, and they were asked for", (voice.progress(voice.whole, digests=()),)
    told = voice.moves_nothing[:1] * (MAX_PROGRESS + 1) or voice.cells[: MAX_PROGRESS + 1]
    if len(told) > MAX_PROGRESS:
        yield "bounds: a progress message too many", tuple(map(voice.progress, told))


def ended(voice: Voice) -> Told:
    """Ends that no counter tells of: the attempt fails as the protocol has it."""
    rest = voice.all_but_one()
    yield "end: a failure", (voice.failed(),)
    yield "end: released before anything", (voice.released(),)
    yield (
        "end: released with all cells and no final",
        (
            voice.progress(voice.whole),
            voice.released(),
        ),
    )
    if rest:
        yield "end: released with a cell missing", (voice.progress(*rest), voice.released())


def corrupt(voice: Voice) -> Told:
    """Legal as they are told; found out when the bytes land, of which none has such a digest."""
    for bits in (32, 63):
        told = voice.progress(voice.whole, digests=(1 << bits,))
        yield f"corrupt: a digest of {bits + 1} bits", (told, voice.final())


def ended_then_late(voice: Voice) -> Told:
    for name, message in _last_words(voice):
        if not isinstance(message, Released):
            yield f"end: a failure, and then {name}", (voice.failed(), message)


def ended_then_stale(voice: Voice) -> Told:
    for name, message in _last_words(voice):
        yield f"end: released, and then {name}", (voice.released(), message)
    done = (voice.failed(), voice.released())
    yield "end: a failure, and then released twice", (*done, voice.released())


def _last_words(voice: Voice) -> Iterator[tuple[str, AttemptMessage]]:
    yield "cells", voice.progress(voice.cell)
    yield "a final", voice.final()
    yield "a word", voice.computing()
    yield "a failure", voice.failed()
    yield "a release", voice.released()


def not_its_lease(
    voice: Voice, samples: Sequence[AttemptMessage], others: Sequence[Identity]
) -> Told:
    attempt, slot, generation = voice.identity
    wrong = {
        "the next slot": (slot + 1, generation),
        "an earlier slot": (slot - 1, generation),
        "the next generation": (slot, generation + 1),
        "the generation before": (slot, generation - 1),
        "a slot that is not there": (slot + _FAR, generation),
    }
    for at, (_, their_slot, their_generation) in enumerate(others):
        if (their_slot, their_generation) != (slot, generation):
            wrong[f"the lease of neighbour {at}"] = (their_slot, their_generation)
    edges = {f"slot {at}": (at, generation) for at in range(_EDGE) if at != slot}
    for name, lease in edges.items():
        yield f"lease: progress of {name}", (_of(voice.progress(voice.whole), attempt, *lease),)
    for name, lease in wrong.items():
        if min(lease) >= 0:
            for message in samples:
                yield f"lease: {_word(message)} of {name}", (_of(message, attempt, *lease),)


def not_its_attempt(
    voice: Voice, samples: Sequence[AttemptMessage], others: Sequence[Identity]
) -> Told:
    (epoch, counter, attempt), slot, generation = voice.identity
    unknown = {
        "the next attempt": AttemptId(epoch, counter, attempt + 1),
        "the attempt before": AttemptId(epoch, counter, attempt - 1),
        "an unknown request": AttemptId(epoch, counter + _FAR, attempt),
        "the next epoch": AttemptId(epoch + 1, counter, attempt),
        "the epoch before": AttemptId(epoch - 1, counter, attempt),
        "no epoch": AttemptId(0, counter, attempt),
    }
    wrong: dict[str, Identity] = {
        name: (theirs, slot, generation) for name, theirs in unknown.items()
    }
    for at, theirs in enumerate(others):
        wrong[f"neighbour {at}"] = theirs
        wrong[f"neighbour {at} in this slot"] = (theirs[0], slot, generation)
    for name, identity in wrong.items():
        for message in samples:
            if identity[0] != voice.prefill.attempt:
                yield f"attempt: {_word(message)} of {name}", (_of(message, *identity),)


def handshake(voice: Voice) -> Told:
    plan = voice.plan
    manifest = Manifest("source", "", plan.layers, (plan.layout,), 1, "float32", plan.num_tokens)
    yield "handshake: ready once more", (Ready(manifest),)
    yield "handshake: attached once more", (Attached(voice.prefill.attempt.epoch),)
    yield "handshake: incompatible all of a sudden", (Incompatible("model", "differs"),)


def legal(voice: Voice) -> Told:
    """Odd, and legal: these must not be taken for wrong."""
    yield "legal: twenty words", (voice.computing(),) * 20
    for at, span in enumerate(voice.moves_nothing[:3]):
        told = voice.progress(span)
        yield f"legal: a span without cells in layer {span.layer_start}", (told,)
        yield f"legal: it twice in one message, {at}", (voice.progress(span, span),)
        yield f"legal: it in two messages, {at}", (told, told)
        late = msgspec.structs.replace(told, begun_ns=_WILD_NS, ready_ns=0)
        yield f"legal: a clock that runs wild, {at}", (late,)


def _word(message: AttemptMessage) -> str:
    return type(message).__name__.lower()


def _of(message: AttemptMessage, attempt: AttemptId, slot: int, generation: int) -> AttemptMessage:
    """The same message, told of another lease."""
    return msgspec.structs.replace(message, attempt=attempt, slot=slot, generation=generation)
