"""Kept prompts at the shell: what a decoder that fails may do to them, and to whom."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from headrace.backends.base import (
    Entry,
    Kept,
    PrefillEngine,
    PrefillSink,
    Reservation,
    ReserveFailed,
    SpanWriter,
)
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import DeviceError, LocalProtocolError, Refused
from headrace.geometry import Manifest
from headrace.ids import AttemptId, Span
from headrace.messages import Cancel, Prefill
from headrace.runtime.local import LocalSource
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle

CONTEXT = 64
STORAGE = 1000
ROWS = 300  # more than the logits and the tokens of one prompt
PROMPT = list(range(20))


class Keeper(NullDecoder):
    """The null decoder, which keeps what it published as bytes; `fail` names what raises."""

    def __init__(self, *, lanes: int = 2, keeps: int = 2) -> None:
        source = open_replay({"layers": 3, "heads": 2, "head_dim": 4})
        manifest = decoder_like(source.manifest())
        super().__init__(manifest, context=CONTEXT, lanes=lanes)
        source.close()
        self.keeps_nbytes = keeps * (STORAGE + ROWS)
        self._lies: dict[int, int] = {}  # the number of the memory of a lane, once it is kept
        self.fail: dict[str, Exception] = {}
        self.kept: dict[int, tuple[Kept, bytes]] = {}
        self.evicted: list[Kept] = []

    @property
    def kept_nbytes(self) -> int:
        return STORAGE * len(self.kept)

    def _may(self, what: str) -> None:
        if what in self.fail:
            raise self.fail.pop(what)

    def keep(self, entry: Entry) -> Kept:
        self._may("keep")
        number = len(self.kept) + len(self.evicted)
        kept = Kept(number, entry.num_tokens, number, STORAGE, 0)
        self.kept[number] = kept, bytes(self._lanes[entry.lane].view)
        self._lies[entry.lane] = number
        return kept

    def storage_of(self, held: Reservation | Entry) -> int:
        self._may("storage_of")
        return self._lies.get(held.lane, -1)

    def can_reuse(self, kept: Kept, positions: int) -> bool:
        return positions == kept.num_tokens

    def reserve_from(self, kept: Kept, positions: int, num_tokens: int) -> Reservation:
        self._may("reserve_from")
        reservation = self.reserve(num_tokens)
        self._lanes[reservation.lane].view[:] = self.kept[kept.serial][1]
        return reservation

    def free(self, held: Reservation | Entry) -> None:
        self._may("free")
        super().free(held)
        self._lies.pop(held.lane, None)

    def publish(self, reservation: Reservation) -> Entry:
        self._may("publish")
        return super().publish(reservation)

    def evict(self, kept: Kept) -> None:
        self._may("evict")
        del self.kept[kept.serial]
        self.evicted.append(kept)


class Engine:
    """The replay engine in this process; what it goes on from is noted.

    spoiled: how many of its next rows of logits are no numbers.
    """

    def __init__(self) -> None:
        self._engine = open_replay({"layers": 3, "heads": 2, "head_dim": 4})
        self.spoiled = 0
        self.continued: list[int] = []
        self.starts: list[int] = []

    def manifest(self) -> Manifest:
        return msgspec.structs.replace(self._engine.manifest(), prefix="own_cache")

    def continue_from(self, kept: Kept) -> None:
        self.continued.append(kept.serial)

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        self.starts.append(start)
        self._engine.prefill_stream(tokens, Spoiling(sink, self) if self.spoiled else sink, start)

    def close(self) -> None:
        self._engine.close()


class Spoiling:
    """A sink whose final row is spoiled; implements `PrefillSink`."""

    def __init__(self, sink: PrefillSink, engine: Engine) -> None:
        self._sink = sink
        self._engine = engine
        self.plan, self.options = sink.plan, sink.options

    def check(self) -> None:
        self._sink.check()

    def write(self, *spans: Span) -> SpanWriter:
        return self._sink.write(*spans)

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        assert logits is not None
        self._engine.spoiled -= 1
        nothing = array("f", [math.nan] * (len(memoryview(logits).cast("B")) // 4))
        self._sink.final(nothing.tobytes(), ready_ns=ready_ns)


@contextmanager
def owner_of(decoder: NullDecoder, engine: PrefillEngine | None = None) -> Iterator[DecoderOwner]:
    engine = engine or open_replay({"layers": 3, "heads": 2, "head_dim": 4})
    owner = DecoderOwner(decoder, context=CONTEXT, local=engine)
    try:
        yield owner
    finally:
        owner.close()


def submit(owner: DecoderOwner, tokens: list[int] = PROMPT, **changes: Any) -> Request:
    """By the owner's own engine, which stands for a source here: there is no other."""
    asked: dict[str, Any] = {"max_tokens": 0, "prefix": "shared", "on_failure": "local"}
    return owner.submit(tokens, RequestOptions(**asked | changes))


def other(token: int) -> list[int]:
    return [token] * 9


def run(owner: DecoderOwner, tokens: list[int] = PROMPT, **changes: Any) -> Request:
    request = submit(owner, tokens, **changes)
    owner.run_until_done(request)
    return request


def positions(request: Request) -> int:
    assert request.reuse is not None
    return request.reuse.positions


def test_a_decoder_that_keeps_nothing_says_so() -> None:
    engine = open_replay({"layers": 3, "heads": 2, "head_dim": 4})
    decoder = NullDecoder(decoder_like(engine.manifest()), context=CONTEXT, lanes=1)
    engine.close()
    for each in (decoder, Keeper(keeps=0)):
        with owner_of(each) as owner:
            for _ in range(2):
                request = run(owner)
                assert request.outcome == "finished"
                assert request.reuse is not None
                assert "keeps no prompts" in request.reuse.reason


def test_what_is_kept_is_published_again_without_a_source() -> None:
    with owner_of(Keeper()) as owner:
        first = run(owner)
        again = run(owner)
        assert (positions(first), positions(again)) == (0, len(PROMPT))
        assert again.measured is not None
        assert (again.measured.kv_nbytes, again.measured.imports) == (0, 0)
        assert again.measured.source_final_ns == again.measured.submitted_ns
        assert owner.statistics()["decoder"]["free"] == 2
        owner.check_integrity()


def test_a_first_token_that_a_source_gave_is_kept_with_its_prompt() -> None:
    with owner_of(Keeper()) as owner:
        first = run(owner, hold=True)
        owner.release(first)
        again = run(owner, hold=True)
        assert again.logits == first.logits
        assert again.logits
        owner.release(again)


def test_a_decoder_that_cannot_keep_fails_that_request_and_sets_its_lane_apart() -> None:
    decoder = Keeper()
    with owner_of(decoder) as owner:
        decoder.fail["keep"] = DeviceError("no snapshot")
        request = run(owner)
        assert (request.outcome, request.cause) == ("failed", "device")
        assert "it could not be kept: no snapshot" in request.reason
        assert owner.statistics()["quarantined"]["lanes"] == 1
        assert run(owner).outcome == "finished"
        assert len(owner._keeping.index) == 1


def test_without_memory_for_it_a_prompt_is_not_kept_and_its_request_goes_on() -> None:
    decoder = Keeper()
    with owner_of(decoder) as owner:
        decoder.fail["keep"] = Refused("no memory for its tails")
        assert run(owner).outcome == "finished"
        assert positions(run(owner)) == 0


@pytest.mark.parametrize("error", [DeviceError("it hangs"), LocalProtocolError("no memory left")])
def test_a_reservation_that_fails_fails_its_request_only(error: Exception) -> None:
    decoder = Keeper()
    with owner_of(decoder) as owner:
        run(owner)
        decoder.fail["reserve_from"] = error
        request = run(owner)
        assert (request.outcome, request.cause) == ("failed", "device")
        assert run(owner).outcome == "finished"
        assert owner.statistics()["prefix"]["pinned"] == 0
        owner.check_integrity()


def test_a_lane_in_quarantine_takes_what_is_kept_in_its_memory_along() -> None:
    decoder = Keeper()
    with owner_of(decoder) as owner:
        decoder.fail["free"] = DeviceError("it is not freed")
        run(owner)
        assert owner.statistics()["quarantined"]["lanes"] == 1
        assert len(owner._keeping.index) == 0
        assert [kept.num_tokens for kept in decoder.evicted] == [len(PROMPT)]
        assert positions(run(owner)) == 0


def test_one_that_waits_for_what_is_lost_meanwhile_fails_and_takes_no_lane() -> None:
    decoder = Keeper(lanes=2)
    with owner_of(decoder) as owner:
        run(owner)
        held = [run(owner, other(at), hold=True, prefix="off") for at in (1, 2)]
        waiting = submit(owner)
        assert positions(waiting) == len(PROMPT)
        (prompt,) = owner._keeping.index
        owner._keeping.distrust(prompt.kept)
        for each in held:
            owner.release(each)
        owner.run_until_done(waiting)
        assert (waiting.outcome, waiting.cause) == ("failed", "no-storage")
        assert "what was kept of its prompt went out of service" in waiting.reason
        assert owner.statistics()["decoder"]["free"] == 2
        assert owner.statistics()["prefix"]["pinned"] == 0
        owner.check_integrity()


def test_what_waits_is_not_evicted_and_a_cancel_lets_it_go() -> None:
    decoder = Keeper(lanes=1, keeps=1)
    with owner_of(decoder) as owner:
        run(owner)
        held = run(owner, other(1), hold=True)  # kept too, and over the bound
        assert [prompt.tokens[0] for prompt in owner._keeping.index] == [1]
        waiting = submit(owner, other(1))
        assert positions(waiting) == 9
        refused = submit(owner, other(1))
        assert positions(refused) == 9  # the same prompt is pinned twice
        owner.cancel(refused)
        owner.cancel(waiting)
        assert owner.statistics()["prefix"]["pinned"] == 0
        owner.release(held)
        assert owner.drain()
        owner.check_integrity()


def test_an_evict_that_fails_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Keeper(keeps=1)
    with owner_of(decoder) as owner:
        run(owner)
        decoder.fail["evict"] = DeviceError("it hangs")
        assert run(owner, other(1)).outcome == "finished"
        assert "was not evicted: it hangs" in caplog.text
        assert run(owner, other(2)).outcome == "finished"
        owner.check_integrity()


def test_a_publish_that_fails_keeps_nothing() -> None:
    decoder = Keeper()
    with owner_of(decoder) as owner:
        decoder.fail["publish"] = DeviceError("it hangs")
        assert run(owner).outcome == "failed"
        assert len(owner._keeping.index) == 0


def test_a_submit_that_is_refused_unpins() -> None:
    with owner_of(Keeper(lanes=1)) as owner:
        run(owner)
        (prompt,) = owner._keeping.index
        owner._decoder.fail["free"] = DeviceError("gone")  # type: ignore[attr-defined]
        run(owner, other(1), prefix="off")
        with pytest.raises(Refused, match="no decoder storage is left"):
            submit(owner)
        assert prompt.pins == 0


def test_two_that_wait_for_one_are_pinned_twice_and_the_last_lets_it_go() -> None:
    decoder = Keeper(lanes=1, keeps=1)
    with owner_of(decoder) as owner:
        run(owner)
        held = run(owner, other(1), hold=True, prefix="off")
        first, second = submit(owner), submit(owner)
        (prompt,) = owner._keeping.index
        assert prompt.pins == 2
        owner.cancel(first)
        assert prompt.pins == 1
        owner.release(held)
        owner.run_until_done(second)
        assert (second.outcome, prompt.pins) == ("finished", 0)


# Found by a reader who meant harm.


def test_a_row_of_logits_that_gives_no_token_is_not_kept() -> None:
    """Or every identical prompt would fail on it."""
    engine = Engine()
    with owner_of(Keeper(), engine) as owner:
        engine.spoiled = 1
        first = run(owner, max_tokens=1)
        assert (first.outcome, first.cause) == ("failed", "malformed")
        assert len(owner._keeping.index) == 0
        again = run(owner, max_tokens=1)
        assert (again.outcome, positions(again)) == ("finished", 0)
        assert positions(run(owner, max_tokens=1)) == len(PROMPT)


def test_what_is_to_be_gone_on_from_is_told_to_the_engine_when_it_runs_and_not_before() -> None:
    """A grant that is withdrawn leaves nothing behind for the next one."""
    engine = Engine()
    decoder = Keeper()
    local = LocalSource(engine, decoder.manifest(), CONTEXT)
    local.open()
    kept = Kept(5, 9, 0, STORAGE, 0)
    attempt = AttemptId(1, 0, 1)
    granted = Prefill(attempt, 0, 0, 20, "whole", 1, 0, 0, "layers", False, 9, (9,))
    local.continue_from(kept)
    local.send(granted)
    local.send(Cancel(attempt))
    owner = DecoderOwner(decoder, context=CONTEXT)
    plan_for = owner._sources._plan_for(local.layout)
    local.run(plan_for, lambda _: None, lambda: None)
    assert (engine.continued, engine.starts) == ([], [])
    local.send(msgspec.structs.replace(granted, start=0, cuts=()))
    local.run(plan_for, lambda _: None, lambda: None)
    assert (engine.continued, engine.starts) == ([], [0])
    local.continue_from(kept)
    local.send(granted)
    local.run(plan_for, lambda _: None, lambda: None)
    assert (engine.continued, engine.starts) == ([5], [0, 9])
    local.close()
    owner.close()


@pytest.mark.parametrize("on_failure", ["retry", "local"])
def test_a_request_that_wants_something_to_follow_has_no_remainder_by_the_owner(
    on_failure: Any,
) -> None:
    with owner_of(Keeper(), Engine()) as owner:
        assert owner._owner_continues(RequestOptions(prefix="shared"))
        assert not owner._owner_continues(RequestOptions(prefix="shared", on_failure=on_failure))
        assert not owner._owner_continues(RequestOptions(prefix="identical"))


def test_an_engine_whose_slot_is_lost_gets_no_remainder() -> None:
    with owner_of(Keeper(), Engine()) as owner:
        assert owner._sources.local_continues()
        (source,) = owner._machine._sources.values()
        source.dead = True
        assert not owner._sources.local_continues()
        source.dead = False


def test_an_engine_that_has_no_memory_for_a_slot_gets_no_remainder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(*_: object) -> None:
        raise Refused("no memory")

    with owner_of(Keeper(), Engine()) as owner:
        monkeypatch.setattr("headrace.runtime.local.Slab.create", short)
        assert not owner._sources.local_continues()


def test_a_lane_that_is_lost_takes_only_what_lies_in_its_own_memory_along() -> None:
    """What it was copied from is sound, and others may wait for it."""
    decoder = Keeper(keeps=3)
    with owner_of(decoder) as owner:
        run(owner)
        decoder.fail["free"] = DeviceError("it is not freed")
        assert positions(run(owner)) == len(PROMPT)
        assert owner.statistics()["quarantined"]["lanes"] == 1
        assert positions(run(owner)) == len(PROMPT)


def test_where_it_is_not_known_where_a_lane_lies_nothing_is_kept_any_more() -> None:
    decoder = Keeper(keeps=3)
    with owner_of(decoder) as owner:
        run(owner)
        run(owner, other(1))
        decoder.fail |= {"free": DeviceError("gone"), "storage_of": DeviceError("gone")}
        run(owner, other(2), prefix="off")
        assert len(owner._keeping.index) == 0
        owner.check_integrity()


def test_a_lane_whose_filling_failed_is_apart_and_can_be_reinstated() -> None:
    decoder = Keeper(lanes=1)
    with owner_of(decoder) as owner:
        run(owner)
        taken = decoder.reserve(len(PROMPT))
        decoder.free(taken)
        decoder.fail["reserve_from"] = DeviceError("x")
        reserve_from = decoder.reserve_from

        def failing(kept: Kept, positions: int, num_tokens: int) -> Reservation:
            decoder.reserve_from = reserve_from  # type: ignore[method-assign]
            raise ReserveFailed("its copy failed", decoder.reserve(num_tokens))

        decoder.reserve_from = failing  # type: ignore[method-assign]
        decoder.fail.clear()
        request = run(owner)
        assert (request.outcome, request.cause) == ("failed", "device")
        (attempt,) = owner.quarantined()
        owner.reinstate(attempt)
        assert run(owner).outcome == "finished"
        assert owner.statistics()["decoder"]["free"] == 1


def test_an_interrupt_between_keeping_and_noting_leaves_nothing_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Keeper()
    with owner_of(decoder) as owner:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner._keeping.index, "add", interrupted)
            request = submit(owner)
            with pytest.raises(KeyboardInterrupt):
                owner.run_until_done(request)
        assert decoder.kept == {}
        assert owner.drain()
        assert run(owner).outcome == "finished"


def test_who_computed_is_told_as_it_was() -> None:
    with owner_of(Keeper()) as owner:
        request = run(owner)
        assert request.reuse is not None
        assert request.reuse.remainder == "owner"  # nobody else is here


def test_cuts_of_its_own_keep_a_request_to_the_same_prompt() -> None:
    with owner_of(Keeper()) as owner:
        run(owner)
        longer = [*PROMPT, 1, 2, 3]
        assert positions(run(owner, longer, prefill_cuts=(21,))) == 0
        assert positions(run(owner, longer, prefill_cuts=(21,))) == len(longer)
        assert positions(run(owner, [*longer, 4])) == len(longer)


def test_a_cut_that_the_chunk_makes_by_itself_is_the_same_as_none() -> None:
    with owner_of(Keeper(keeps=4)) as owner:
        run(owner, prefill_chunk=5, prefill_cuts=(5, 10))
        assert positions(run(owner, prefill_chunk=5, prefix="identical")) == len(PROMPT)
        again = run(owner, prefill_chunk=5, prefill_cuts=(10,), prefix="identical")
        assert positions(again) == len(PROMPT)


def test_a_digest_is_not_promised_of_cells_that_were_kept_without() -> None:
    with owner_of(Keeper(keeps=4)) as owner:
        run(owner)
        assert positions(run(owner, digest=True)) == 0
        assert positions(run(owner, poison=True)) == 0
        assert positions(run(owner)) == len(PROMPT)


def test_two_sources_are_the_same_only_in_the_same_surroundings() -> None:
    made = [
        SourceHandle("replay", {"layers": 3}),
        SourceHandle("replay", {"layers": 4}),
        SourceHandle("replay", {"layers": 3}, env={"X": "1"}),
        SourceHandle("replay", {"layers": 3}, interpreter="/usr/bin/python3"),
        SourceHandle("torch", {"layers": 3}),
    ]
    assert len({handle.maker for handle in made}) == len(made)
    assert SourceHandle("replay", {"layers": 3}).maker == made[0].maker
