"""One hand-off: what is told is checked before anything changes, and it is published only when
every condition of rule 1 holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headrace.errors import LocalProtocolError, RemoteProtocolError
from headrace.geometry import Kind, Sliding
from headrace.ids import ImportId, SlotIndex, SourceId, Span
from headrace.messages import MAX_PROGRESS
from headrace.protocol.commands import Outcome
from headrace.protocol.handoff import Handoff, HandoffState, SpanImport
from headrace.protocol.slots import Slot
from tests.unit.protocol.builders import (
    FULL,
    HYBRID,
    ROW_NBYTES,
    attempt_id,
    cells_of,
    make_plan,
    trace_of,
)

N = 4
WHOLE = Span(0, 3, 0, N)
HALVES = (Span(0, 3, 0, 2), Span(0, 3, 2, N))
A = attempt_id()
S = HandoffState
BIG = 1 << 20


def lease(handoff: Handoff, kinds: Sequence[Kind] = FULL) -> None:
    granted = Slot(SlotIndex(0)).lease(handoff.attempt)
    handoff.take_lease(SourceId(0), granted, make_plan(handoff.num_tokens, *kinds), 5)


def waiting() -> Handoff:
    return Handoff(A, N)


def parked() -> Handoff:
    handoff = waiting()
    lease(handoff)
    return handoff


def reserved() -> Handoff:
    handoff = waiting()
    handoff.reserve()
    return handoff


def streaming(*, digest: bool = False, kinds: Sequence[Kind] = FULL, n: int = N) -> Handoff:
    handoff = Handoff(A, n, digest=digest)
    handoff.reserve()
    lease(handoff, kinds)
    return handoff


def streaming_busy() -> Handoff:
    """One import runs, one is queued, one span was not told."""
    handoff = streaming()
    handoff.progress([Span(0, 1, 0, N), Span(1, 2, 0, N)], [], 10)
    handoff.begin_import(ImportId(0), BIG)
    return handoff


def sealed_busy() -> Handoff:
    """All was told; one import runs, one is queued."""
    handoff = streaming()
    handoff.progress(HALVES, [], 10)
    handoff.begin_import(ImportId(0), BIG)
    handoff.source_final(None, 11)
    return handoff


def sealed_landed() -> Handoff:
    handoff = sealed_busy()
    handoff.begin_import(ImportId(1), BIG)
    handoff.end_import(ImportId(1))
    handoff.end_import(ImportId(0))
    return handoff


def published() -> Handoff:
    handoff = sealed_landed()
    handoff.publish()
    return handoff


def draining() -> Handoff:
    handoff = streaming_busy()
    handoff.end(Outcome.CANCELLED)
    return handoff


def given_up() -> Handoff:
    """As `draining`, and another attempt is to follow."""
    handoff = streaming_busy()
    handoff.end(None, "the engine failed")
    return handoff


def given_up_quiet() -> Handoff:
    handoff = reserved()
    handoff.end(None, "the engine failed")
    return handoff


def ended() -> Handoff:
    handoff = waiting()
    handoff.end(Outcome.FAILED)
    return handoff


MADE: dict[str, Callable[[], Handoff]] = {
    "waiting": waiting,
    "parked": parked,
    "reserved": reserved,
    "streaming": streaming,
    "streaming, busy": streaming_busy,
    "sealed, busy": sealed_busy,
    "sealed, landed": sealed_landed,
    "published": published,
    "draining": draining,
    "given up": given_up,
    "given up, quiet": given_up_quiet,
    "ended": ended,
}
EVENTS: dict[str, Callable[[Handoff], object]] = {
    "reserve": lambda h: h.reserve(),
    "lease": lease,
    "progress": lambda h: h.progress([Span(2, 3, 0, N)], [], 20),
    "computing": lambda h: h.computing(20),
    "final": lambda h: h.source_final(None, 20),
    "begin": lambda h: h.begin_import(ImportId(7), BIG),
    "check": lambda h: h.begin_digest_check(ImportId(8), SpanImport(WHOLE, 1, 0)),
    "end import": lambda h: h.end_import(ImportId(0)),
    "publish": lambda h: h.publish(),
    "end": lambda h: h.end(Outcome.FAILED),
    "give up": lambda h: h.end(None),
    "decide": lambda h: h.decide(Outcome.FAILED),
}
LEGAL: dict[str, dict[str, HandoffState]] = {
    "waiting": {"reserve": S.RESERVED, "lease": S.PARKED, "end": S.ENDED},
    "parked": {
        "reserve": S.STREAMING,
        "progress": S.PARKED,
        "computing": S.PARKED,
        "end": S.ENDED,
    },
    "reserved": {"lease": S.STREAMING, "end": S.ENDED},
    "streaming": {
        "progress": S.STREAMING,
        "computing": S.STREAMING,
        "check": S.STREAMING,
        "end": S.ENDED,
    },
    "streaming, busy": {
        "progress": S.STREAMING,
        "computing": S.STREAMING,
        "begin": S.STREAMING,
        "check": S.STREAMING,
        "end import": S.STREAMING,
        "end": S.DRAINING,
    },
    "sealed, busy": {
        "begin": S.SEALED,
        "check": S.SEALED,
        "end import": S.SEALED,
        "end": S.DRAINING,
    },
    "sealed, landed": {"check": S.SEALED, "publish": S.PUBLISHED, "end": S.ENDED},
    "published": {"end": S.ENDED},
    "draining": {"end import": S.ENDED},
    "given up": {"end import": S.ENDED, "decide": S.DRAINING},
    "given up, quiet": {"decide": S.ENDED},
    "ended": {},
}
for row in LEGAL.values():
    row |= {"give up": row["end"]} if "end" in row else {}


@pytest.mark.parametrize("made", MADE)
def test_every_event_in_every_state_is_legal_or_leaves_no_trace(made: str) -> None:
    for event in EVENTS:
        check_event(made, event)


def check_event(made: str, event: str) -> None:
    handoff = MADE[made]()
    before = trace_of(handoff)
    if event in LEGAL[made]:
        EVENTS[event](handoff)
        assert handoff.state is LEGAL[made][event]
    else:
        told = event in ("progress", "computing", "final")
        blamed = RemoteProtocolError if told else LocalProtocolError
        with pytest.raises(blamed, match=r"hand-off|missing"):
            EVENTS[event](handoff)
        assert trace_of(handoff) == before


def test_a_word_of_work_moves_the_progress_deadline_and_nothing_else() -> None:
    handoff = streaming_busy()
    before = vars(handoff) | {"last_progress_ns": 20}
    handoff.computing(20)
    assert vars(handoff) == before


def test_no_work_is_told_of_after_the_final() -> None:
    handoff = parked()
    handoff.progress([WHOLE], [], 10)
    handoff.source_final(None, 11)
    before = trace_of(handoff)
    with pytest.raises(RemoteProtocolError, match="computing after the final"):
        handoff.computing(20)
    assert trace_of(handoff) == before


def land(handoff: Handoff) -> None:
    """Begin and fence all that is queued."""
    while handoff.has_pieces:
        handoff.begin_import(ImportId(100), BIG)
        handoff.end_import(ImportId(100))


# Rule 1.


def test_it_is_published_when_every_cell_landed_and_the_final_is_there() -> None:
    handoff = streaming()
    handoff.progress([WHOLE], [], 10)
    land(handoff)
    assert not handoff.publishable
    handoff.source_final(None, 11)
    assert handoff.publishable
    handoff.publish()
    assert (handoff.state, handoff.outcome) == (S.PUBLISHED, Outcome.PUBLISHED)


def test_a_final_before_the_imports_seals_and_waits() -> None:
    handoff = streaming()
    handoff.progress([WHOLE], [], 10)
    handoff.source_final(3, 11)
    assert (handoff.state, handoff.publishable, handoff.token) == (S.SEALED, False, 3)
    land(handoff)
    assert handoff.publishable


@pytest.mark.parametrize("without", ["import", "second import", "digest", "final"])
def test_publishing_is_refused_while_a_condition_is_missing(without: str) -> None:
    handoff = streaming(digest=True)
    handoff.progress(HALVES, [1, 2], 10)
    if without != "final":
        handoff.source_final(None, 11)
    handoff.begin_import(ImportId(0), BIG)
    entry = None
    if without != "import":
        entry = handoff.end_import(ImportId(0))
        assert entry is not None
        handoff.begin_digest_check(ImportId(1), entry)
        handoff.end_import(ImportId(1))
    if without in ("digest", "final"):
        handoff.begin_import(ImportId(2), BIG)
        entry = handoff.end_import(ImportId(2))
        assert entry is not None
        handoff.begin_digest_check(ImportId(3), entry)
        handoff.end_import(ImportId(3), good=without == "final")
    assert not handoff.publishable
    before = trace_of(handoff)
    with pytest.raises(LocalProtocolError, match=r"publish|PUBLISH"):
        handoff.publish()
    assert trace_of(handoff) == before


def test_a_failed_import_never_lands_its_span() -> None:
    handoff = streaming()
    handoff.progress([WHOLE], [], 10)
    handoff.source_final(None, 11)
    handoff.begin_import(ImportId(0), BIG)
    assert handoff.end_import(ImportId(0), good=False) is None
    assert not handoff.publishable
    with pytest.raises(LocalProtocolError, match=r"final True, missing layers \[0, 1\)"):
        handoff.publish()


def test_one_of_two_pieces_does_not_land_the_span() -> None:
    handoff = streaming()
    handoff.progress([WHOLE], [], 10)
    handoff.source_final(None, 11)
    chunk = 2 * N * ROW_NBYTES
    assert handoff.begin_import(ImportId(0), chunk) == (Span(0, 2, 0, N), 2 * N * ROW_NBYTES)
    assert handoff.begin_import(ImportId(1), BIG) == (Span(2, 3, 0, N), N * ROW_NBYTES)
    handoff.end_import(ImportId(1))
    assert (handoff.publishable, handoff.in_flight) == (False, 1)
    handoff.end_import(ImportId(0))
    assert handoff.publishable


def test_a_span_is_cut_when_its_import_begins_and_not_before() -> None:
    """So that the pieces are those of the moment, if entries begin to decode meanwhile."""
    handoff = streaming()
    handoff.progress([WHOLE], [], 10)
    layer = N * ROW_NBYTES
    assert handoff.begin_import(ImportId(0), layer) == (Span(0, 1, 0, N), layer)
    assert handoff.begin_import(ImportId(1), layer // N) == (Span(1, 2, 0, 1), layer // N)
    assert handoff.begin_import(ImportId(2), BIG) == (Span(1, 2, 1, 2), layer // N)
    handoff.source_final(None, 11)
    for at in range(3):
        handoff.end_import(ImportId(at))
        assert not handoff.publishable
    land(handoff)
    assert handoff.publishable


def test_a_transfer_set_without_cells_is_published_on_the_final_alone() -> None:
    handoff = streaming(kinds=(Sliding(4, 0),))
    handoff.source_final(None, 11)
    assert handoff.publishable


def test_spans_without_cells_are_legal_and_queue_nothing() -> None:
    handoff = streaming(kinds=HYBRID, n=9)
    handoff.progress([Span(3, 4, 0, 9), Span(0, 1, 0, 5)], [], 10)
    assert not handoff.has_pieces
    handoff.progress([Span(0, 5, 0, 9)], [], 10)
    handoff.source_final(None, 11)
    land(handoff)
    assert handoff.publishable


@pytest.mark.parametrize("chunk", [0, ROW_NBYTES, 100, 1000, BIG])
def test_the_pieces_of_a_span_are_its_cells_once_each_and_none_is_empty(chunk: int) -> None:
    handoff = streaming(kinds=HYBRID, n=9)
    plan = make_plan(9, *HYBRID)
    handoff.progress([plan.whole()], [], 10)
    pieces: list[Span] = []
    while handoff.has_pieces:
        piece, nbytes = handoff.begin_import(ImportId(len(pieces)), chunk)
        assert nbytes == plan.span_nbytes(piece) > 0
        pieces.append(piece)
    assert sorted(cells_of(plan, *pieces)) == sorted(cells_of(plan, plan.whole()))


# What a source tells.


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 1, 0, N), Span(0, 1, 0, N)],
        [Span(0, 1, 0, N), Span(0, 1, 0, N + 1), Span(1, 2, 0, N)],
        [Span(0, 1, 0, N), Span(2, 4, 0, N)],
        [Span(0, 1, 0, N), Span(1, 1, 0, N)],
    ],
)
def test_a_malformed_message_leaves_no_trace(spans: list[Span]) -> None:
    handoff = streaming()
    before = trace_of(handoff)
    with pytest.raises(RemoteProtocolError):
        handoff.progress(spans, [], 10)
    assert trace_of(handoff) == before


def test_a_cell_told_by_an_earlier_message_is_refused() -> None:
    handoff = streaming_busy()
    before = trace_of(handoff)
    with pytest.raises(RemoteProtocolError, match="told before"):
        handoff.progress([Span(2, 3, 0, N), Span(0, 1, 3, N)], [], 20)
    assert trace_of(handoff) == before


def test_a_final_with_cells_untold_is_refused() -> None:
    handoff = streaming_busy()
    with pytest.raises(RemoteProtocolError, match=r"final, but layers \[2, 3\) .* was never told"):
        handoff.source_final(None, 20)


@pytest.mark.parametrize("make", [parked, streaming])
def test_the_final_is_given_once_and_nothing_is_told_after_it(make: Callable[[], Handoff]) -> None:
    handoff = make()
    handoff.progress([WHOLE], [], 10)
    handoff.source_final(None, 11)
    before = trace_of(handoff)
    for event in ("final", "progress"):
        with pytest.raises(RemoteProtocolError, match=r"second final|after the final|illegal"):
            EVENTS[event](handoff)
        assert trace_of(handoff) == before


def test_cells_and_final_are_signs_of_life_and_spans_without_cells_are_none() -> None:
    handoff = Handoff(A, 9)
    lease(handoff, HYBRID)
    handoff.progress([Span(3, 4, 0, 9), Span(0, 1, 0, 5)], [], 10)
    assert handoff.last_progress_ns == 5
    handoff.progress([Span(3, 4, 0, 9), Span(1, 2, 0, 9), Span(3, 4, 0, 9)], [], 11)
    assert handoff.last_progress_ns == 11
    handoff.progress([Span(0, 1, 5, 9), Span(2, 5, 0, 9)], [], 12)
    handoff.source_final(None, 13)
    assert handoff.last_progress_ns == 13


def test_one_progress_message_more_than_the_bound_is_refused_and_leaves_no_trace() -> None:
    handoff = streaming(kinds=HYBRID, n=9)
    for _ in range(MAX_PROGRESS - 1):
        handoff.progress([Span(3, 4, 0, 9)], [], 10)
    with pytest.raises(RemoteProtocolError, match="outside the model"):
        handoff.progress([Span(3, 6, 0, 9)], [], 10)  # what is refused is not counted
    handoff.progress([Span(0, 5, 0, 9)], [], 10)
    before = trace_of(handoff)
    with pytest.raises(RemoteProtocolError, match="more than 128 progress messages"):
        handoff.progress([Span(3, 4, 0, 9)], [], 11)
    assert trace_of(handoff) == before
    handoff.source_final(None, 12)


# Digests.


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("asked", [True, False])
def test_every_span_is_stamped_where_asked_for(asked: bool, count: int) -> None:
    handoff = streaming(digest=asked)
    if count == 2 or (count == 0 and not asked):
        handoff.progress(HALVES, range(count), 10)
        return
    before = trace_of(handoff)
    with pytest.raises(RemoteProtocolError, match=f"2 spans, {count} digests"):
        handoff.progress(HALVES, range(count), 10)
    assert trace_of(handoff) == before


def test_a_stamped_span_lands_only_after_its_check() -> None:
    handoff = streaming(digest=True)
    handoff.progress([WHOLE], [0xAB], 10)  # two pieces, one check
    handoff.source_final(None, 11)
    for at in (0, 1):
        handoff.begin_import(ImportId(at), 2 * N * ROW_NBYTES)
    assert handoff.end_import(ImportId(0)) is None
    entry = handoff.end_import(ImportId(1))
    assert entry is not None
    assert (entry.span, entry.digest) == (WHOLE, 0xAB)
    assert not handoff.publishable
    handoff.begin_digest_check(ImportId(2), entry)
    assert handoff.span_of(ImportId(2)) == WHOLE
    assert (handoff.in_flight, handoff.publishable) == (1, False)
    assert handoff.end_import(ImportId(2)) is None
    assert handoff.publishable


def test_no_check_begins_while_draining() -> None:
    handoff = streaming(digest=True)
    handoff.progress([WHOLE], [1], 10)
    handoff.begin_import(ImportId(0), BIG)
    handoff.end(Outcome.CANCELLED)
    assert handoff.end_import(ImportId(0)) is None
    assert handoff.state is S.ENDED


# Parking.


def test_a_parked_hand_off_counts_and_keeps_what_it_is_told_and_imports_nothing() -> None:
    handoff = parked()
    handoff.progress([WHOLE], [], 10)
    handoff.source_final(7, 11)
    assert (handoff.state, handoff.has_pieces, handoff.has_storage) == (S.PARKED, False, False)
    handoff.reserve()
    assert (handoff.state, handoff.has_pieces, handoff.has_storage) == (S.SEALED, True, True)
    land(handoff)
    assert handoff.publishable


def told_while_parked(*spans: Span, digests: Sequence[int] = ()) -> list[Span]:
    """What it imports, piece by piece, once it has storage."""
    handoff = Handoff(A, N, digest=bool(digests))
    lease(handoff)
    for span in spans:
        handoff.progress([span], digests, 10)
    handoff.reserve()
    pieces: list[Span] = []
    while handoff.has_pieces:
        pieces.append(handoff.begin_import(ImportId(len(pieces)), BIG)[0])
    return pieces


def test_what_was_told_while_it_was_parked_is_imported_in_as_few_pieces_as_it_makes() -> None:
    by_layer = [Span(at, at + 1, 0, N) for at in range(3)]
    assert told_while_parked(*by_layer) == [WHOLE]
    assert told_while_parked(*by_layer[:2]) == [Span(0, 2, 0, N)]
    by_position = [Span(0, 3, at, at + 1) for at in range(N)]
    assert told_while_parked(*by_position) == [WHOLE]
    assert told_while_parked(*by_position[1:3]) == [Span(0, 3, 1, 3)]
    one, two, three = by_layer
    assert told_while_parked(one, three) == [one, three]
    assert told_while_parked(three, two, one) == [three, two, one]
    corner = Span(1, 2, 0, N - 1)
    assert told_while_parked(one, corner, three) == [one, corner, three]
    assert told_while_parked(*by_layer, digests=[7]) == by_layer


def test_what_is_joined_lands_as_a_whole_and_is_cut_as_any_other() -> None:
    handoff = parked()
    for at in range(3):
        handoff.progress([Span(at, at + 1, 0, N)], [], 10)
    handoff.source_final(7, 11)
    handoff.reserve()
    nearest = handoff.nearness
    pieces: list[Span] = []
    while handoff.has_pieces:
        assert not handoff.publishable
        pieces.append(handoff.begin_import(ImportId(len(pieces)), ROW_NBYTES * N)[0])
        handoff.end_import(ImportId(len(pieces) - 1))
    assert nearest == (False, 3 * N * ROW_NBYTES)
    assert pieces == [Span(at, at + 1, 0, N) for at in range(3)]
    assert handoff.publishable


def test_a_parked_hand_off_goes_on_live_once_it_has_storage() -> None:
    handoff = parked()
    handoff.progress([HALVES[0]], [], 10)
    handoff.reserve()
    assert handoff.state is S.STREAMING
    handoff.progress([HALVES[1]], [], 12)
    land(handoff)
    handoff.source_final(None, 13)
    assert handoff.publishable


# Ends.


OVER = {"draining", "given up", "given up, quiet", "ended"}
UNDER_WAY = sorted(set(MADE) - OVER)


@pytest.mark.parametrize("made", UNDER_WAY)
def test_the_terminal_is_decided_once(made: str) -> None:
    handoff = MADE[made]()
    decided_before = handoff.outcome
    assert handoff.end(Outcome.CANCELLED) == (decided_before is None)
    assert handoff.outcome is (decided_before or Outcome.CANCELLED)
    with pytest.raises(LocalProtocolError):
        handoff.end(Outcome.FAILED)


@pytest.mark.parametrize("made", UNDER_WAY)
def test_what_is_given_up_has_a_reason_and_no_terminal(made: str) -> None:
    handoff = MADE[made]()
    published = made == "published"
    assert not handoff.given_up
    assert not handoff.end(None, "the engine failed")
    assert handoff.given_up is not published
    assert handoff.outcome is (Outcome.PUBLISHED if published else None)
    assert handoff.reason == ("" if published else "the engine failed")
    assert (handoff.live, handoff.has_pieces) == (False, False)


@pytest.mark.parametrize("make", [given_up, given_up_quiet])
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_what_was_given_up_is_decided_once(make: Callable[[], Handoff], outcome: Outcome) -> None:
    handoff = make()
    handoff.decide(outcome)
    assert (handoff.outcome, handoff.given_up) == (outcome, False)
    with pytest.raises(LocalProtocolError, match="is decided"):
        handoff.decide(Outcome.FAILED)
    assert handoff.outcome is outcome


def test_what_was_given_up_is_given_up_until_it_is_quiet_and_after() -> None:
    handoff = given_up()
    handoff.end_import(ImportId(0))
    assert (handoff.state, handoff.given_up) == (S.ENDED, True)


@pytest.mark.parametrize("made", MADE)
def test_a_source_tells_only_of_what_is_neither_published_nor_over(made: str) -> None:
    assert MADE[made]().live == (made not in OVER | {"published"})


def test_an_attempt_knows_where_it_may_go() -> None:
    assert (waiting().local, waiting().avoid) == (False, None)
    handoff = Handoff(A, N, local=True, avoid=SourceId(3))
    assert (handoff.local, handoff.avoid) == (True, 3)


def test_an_ended_hand_off_begins_nothing_that_was_queued() -> None:
    handoff = streaming_busy()
    assert handoff.has_pieces
    handoff.end(Outcome.CANCELLED)
    assert not handoff.has_pieces
    with pytest.raises(LocalProtocolError):
        handoff.begin_import(ImportId(1), BIG)


def test_draining_ends_with_the_last_import() -> None:
    handoff = sealed_busy()
    handoff.begin_import(ImportId(1), BIG)
    handoff.end(Outcome.FAILED)
    handoff.end_import(ImportId(1))
    states = [handoff.state]
    handoff.end_import(ImportId(0), good=False)
    assert [*states, handoff.state] == [S.DRAINING, S.ENDED]


def test_an_import_ends_once() -> None:
    handoff = streaming_busy()
    handoff.begin_import(ImportId(1), BIG)
    handoff.end_import(ImportId(0))
    with pytest.raises(LocalProtocolError, match="import 0 is not in flight"):
        handoff.end_import(ImportId(0))


def test_the_one_nearest_to_publishing_sorts_first() -> None:
    idle, busy, sealed = streaming(), streaming_busy(), sealed_busy()
    busy.progress([Span(2, 3, 0, N)], [], 10)
    assert sorted([busy, sealed, idle], key=lambda h: h.nearness) == [sealed, idle, busy]
    busy.begin_import(ImportId(1), BIG)
    busy.begin_import(ImportId(2), BIG)
    assert busy.nearness == idle.nearness


def test_a_hand_off_without_a_lease_has_no_plan() -> None:
    handoff = parked()
    handoff._plan = None  # what no sequence of events leads to
    with pytest.raises(LocalProtocolError, match="no plan before a lease"):
        handoff.progress([WHOLE], [], 10)


# Positions that its storage holds already.


def test_a_hand_off_whose_prompt_is_all_kept_is_sealed_by_its_storage() -> None:
    handoff = Handoff(attempt_id(), N, start=N)
    assert (handoff.needs_source, handoff.final, handoff.publishable) == (False, True, False)
    handoff.reserve()
    assert (handoff.state, handoff.publishable) == (S.SEALED, True)
    handoff.publish()
    assert handoff.outcome is Outcome.PUBLISHED


def test_cells_that_are_kept_must_not_be_told_and_are_not_missed() -> None:
    handoff = Handoff(attempt_id(), N, start=1)
    handoff.reserve()
    assert (handoff.state, handoff.needs_source, handoff.final) == (S.RESERVED, True, False)
    plan = make_plan(N, *FULL, start=1)
    handoff.take_lease(SourceId(0), Slot(SlotIndex(0)).lease(handoff.attempt), plan, 0)
    handoff.progress([Span(0, 3, 0, 1)], [], 10)  # without cells, as outside a window
    assert not handoff.has_pieces
    handoff.progress([Span(0, 3, 0, N)], [], 11)
    with pytest.raises(RemoteProtocolError, match="told before"):
        handoff.progress([Span(0, 1, 1, 2)], [], 12)
    handoff.source_final(None, 13)
    land(handoff)
    assert handoff.publishable
