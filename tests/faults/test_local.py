"""The owner prefills by itself: as exact as a source, and it hears all that happens meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import PrefillSink
from headrace.backends.null import NullDecoder, decoder_like
from headrace.errors import Cancelled, LocalProtocolError, PeerDied, Refused, Unquiet
from headrace.ids import SourceId
from headrace.messages import Failed, FromSource, Released
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from tests.faults.failing_engines import faulty
from tests.faults.lab import CONTEXT, GEOMETRY, LAYERS, Lab, expected_cells, prompt
from tests.faults.local import LocalEngine, alone, ask, lab, pipe

FAILING = "tests.faults.failing_engines:open_failing"


def serve(made: Lab, tokens: list[int], **options: Any) -> Request:
    """A request that the owner's own engine serves in the end, exactly."""
    request = made.submit(tokens, on_failure="local", hold=True, **options)
    made.until_done(request)
    assert (request.outcome, request.reason) == ("finished", "")
    made.assert_exact(request, tokens)
    made.owner.release(request)
    return request


# Who it serves.


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
def test_a_failed_source_is_followed_by_the_owner(tmp_path: Path, route: str) -> None:
    options = {**GEOMETRY, "faults": ["raises"]}
    with lab(tmp_path, engine=FAILING, options=options) as (made, engine):
        chunk = 7 if route == "chunked" else 0
        request = serve(made, faulty(1), route=route, chunk=chunk)
        assert request.attempts == ["ValueError: layer 2 went up in smoke"]
        assert engine.runs == 1
        made.settle()
        made.serve_exact(2)
        assert engine.runs == 1  # who needs no help gets none


@pytest.mark.parametrize("spans", [0, 2, LAYERS])
def test_a_killed_source_is_followed_by_the_owner(tmp_path: Path, spans: int) -> None:
    """Whatever it had filled of the storage by then; who asked for no help is refused."""
    with lab(tmp_path, lanes=2) as (made, engine):
        request = made.submit(prompt(1), on_failure="local", hold=True)
        made.gate.allow(spans)
        if spans:
            made.until_told(request, spans)
        os.kill(made.handle.pid, signal.SIGKILL)
        made.until_done(request)
        assert engine.runs == 1
        assert "signal 9" in request.attempts[0]
        made.assert_exact(request, prompt(1))
        made.owner.release(request)
        made.settle()
        with pytest.raises(Refused, match="no prefill source is left"):
            made.submit(prompt(3))
        assert serve(made, prompt(4)).attempts == []  # at once: there is nobody else
        made.settle()


def test_who_waits_is_served_by_the_owner_when_no_source_is_left(tmp_path: Path) -> None:
    with lab(tmp_path, lanes=1, slots=1) as (made, engine):
        requests = [made.submit(prompt(seed), on_failure="local", hold=True) for seed in (1, 2, 3)]
        os.kill(made.handle.pid, signal.SIGKILL)
        for seed, request in zip((1, 2, 3), requests, strict=True):
            made.until_done(request)
            made.assert_exact(request, prompt(seed))
            made.owner.release(request)
        assert engine.runs == 3
        made.settle()


def test_it_needs_no_source() -> None:
    with alone(LocalEngine()) as owner:
        tokens = prompt(1)
        with pytest.raises(Refused, match="no prefill source"):
            owner.submit(tokens, RequestOptions(max_tokens=0))
        request = owner.submit(tokens, ask(hold=True, digest=True, poison=True))
        assert not request.done  # it is run in turns and nowhere else
        assert owner.next_turn_s() == 0.0
        owner.run_until_done(request)
        assert request.outcome == "finished", request.reason
        for (layer, part), cells in expected_cells(tokens).items():
            assert owner.read(request, layer, part) == cells
        owner.release(request)


def test_its_slot_is_made_when_a_request_may_need_it(tmp_path: Path) -> None:
    with lab(tmp_path) as (made, engine):
        assert "source 1" not in made.owner.statistics()
        made.gate.open()
        made.serve_exact(1)
        assert "source 1" not in made.owner.statistics()
        made.serve_exact(2, on_failure="local")
        assert made.owner.statistics()["source 1"]["slab_nbytes"] == made.handle.slot_nbytes
        made.serve_exact(3, on_failure="local")
        assert "source 2" not in made.owner.statistics()
        assert engine.runs == 0


def test_too_little_memory_for_its_slot_is_refused_at_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab(tmp_path) as (made, _):
        monkeypatch.setattr("headrace.engine.capacity.available_nbytes", lambda: 0)
        with pytest.raises(Refused, match="headrace-local: needs"):
            made.submit(prompt(1), on_failure="local")
        monkeypatch.undo()
        made.gate.open()
        made.serve_exact(1, on_failure="local")


def test_an_engine_that_does_not_fit_is_refused() -> None:
    decoder = NullDecoder(decoder_like(LocalEngine().manifest()), context=CONTEXT, lanes=1)
    for changes, text in (
        ({"heads": 4}, "k.heads"),
        ({"max_positions": 32}, "the 32 positions of the decoder's own engine"),
    ):
        like = decoder_like(LocalEngine(**changes).manifest())
        fitting = NullDecoder(like, context=32, lanes=1) if "heads" not in changes else decoder
        with pytest.raises(Refused, match=text):
            DecoderOwner(fitting, context=CONTEXT, local=LocalEngine(**changes))
        fitting.close()


# What it hears while it runs.


def test_a_cancel_is_heard_within_a_layer() -> None:
    engine = LocalEngine()
    with alone(engine) as owner, pipe(owner, lambda: owner.cancel(request)) as cancel:
        engine.at_layer = lambda layer: cancel() if layer == 2 else None
        request = owner.submit(prompt(1), ask())
        owner.turn(1.0)
        assert (request.outcome, request.cause) == ("cancelled", "cancelled")
        assert engine.num_layers == 3  # the call in which it was heard is the last
        assert owner.idle


def test_a_cancel_before_its_turn() -> None:
    engine = LocalEngine()
    with alone(engine) as owner:
        request = owner.submit(prompt(1), ask())
        owner.cancel(request)
        owner.turn(1.0)
        assert (request.outcome, engine.runs) == ("cancelled", 0)
        assert owner.idle


def test_a_callback_may_cancel_it() -> None:
    engine = LocalEngine()
    with alone(engine) as owner:
        request = owner.submit(prompt(1), ask(), on_progress=lambda *_: owner.cancel(request))
        owner.turn(1.0)
        assert request.outcome == "cancelled"
        assert engine.num_layers < LAYERS
        assert owner.idle


def test_a_deadline_is_heard() -> None:
    engine = LocalEngine(layer_ms=30)
    with alone(engine) as owner:
        request = owner.submit(prompt(1), ask(deadline_s=0.1))
        owner.turn(1.0)
        assert (request.outcome, request.cause) == ("failed", "deadline")
        assert 2 <= engine.num_layers < LAYERS
        assert owner.idle


def test_an_engine_at_work_is_not_taken_for_one_that_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes longer than a source may be silent, and tells nothing until its end."""
    monkeypatch.setattr("headrace.protocol.source.HEARTBEAT_NS", 10_000_000)
    engine = LocalEngine(layer_ms=60)
    with alone(engine, progress_timeout_s=0.1) as owner:
        request = owner.submit(prompt(1), ask(route="whole"))
        owner.run_until_done(request)
        assert request.outcome == "finished", request.reason


def beside(made: Lab, **options: Any) -> tuple[Request, Request]:
    """A neighbour whose source stands at its gate, and a request that is local next."""
    neighbour = made.submit(prompt(2), hold=True, **options)
    made.gate.allow(2)
    made.until_told(neighbour, 2)
    doomed = made.attach()
    local = made.submit(prompt(1), on_failure="local", hold=True)
    os.kill(doomed.pid, signal.SIGKILL)
    return neighbour, local


def test_other_hand_offs_keep_moving(tmp_path: Path) -> None:
    """A neighbour is told, imported and published within one layer of a local prefill."""
    with lab(tmp_path) as (made, engine):
        neighbour, local = beside(made)

        def finish_the_neighbour(layer: int) -> None:
            if layer == 1:
                made.gates[0].open()
                engine.check_until(lambda: neighbour.done)

        engine.at_layer = finish_the_neighbour
        made.until_done(local)
        assert (neighbour.outcome, local.outcome) == ("finished", "finished")
        made.assert_exact(neighbour, prompt(2))
        made.assert_exact(local, prompt(1))
        for request in (neighbour, local):
            made.owner.release(request)
        made.settle()


def test_a_source_that_dies_meanwhile_is_buried(tmp_path: Path) -> None:
    with lab(tmp_path) as (made, engine):
        neighbour, local = beside(made)

        def kill_the_source(layer: int) -> None:
            if layer == 1:
                os.kill(made.handles[0].pid, signal.SIGKILL)
                engine.check_until(lambda: neighbour.done)

        engine.at_layer = kill_the_source
        made.until_done(local)
        assert (neighbour.outcome, neighbour.cause) == ("failed", "source-died")
        made.assert_exact(local, prompt(1))
        made.owner.release(local)
        made.settle()


def test_a_request_may_be_submitted_meanwhile() -> None:
    engine = LocalEngine()
    later: list[Request] = []
    with alone(engine) as owner:
        submit = lambda: later.append(owner.submit(prompt(2), ask(hold=True)))  # noqa: E731
        with pipe(owner, submit) as trigger:
            engine.at_layer = lambda layer: trigger() if layer == 2 and not later else None
            request = owner.submit(prompt(1), ask(hold=True))
            owner.turn(1.0)
            assert request.outcome == "finished"
            owner.run_until_done(*later)
            assert [each.outcome for each in later] == ["finished"]
            owner.release(request)
            owner.release(later[0])


# What goes wrong in it.


def test_what_its_engine_raises_ends_the_request() -> None:
    """There is nobody left to follow."""
    with alone(LocalEngine(fail_at_layer=3)) as owner:
        request = owner.submit(prompt(1), ask())
        owner.run_until_done(request)
        assert (request.outcome, request.cause) == ("failed", "source-failed")
        assert request.reason == "RuntimeError: replay was told to fail at layer 3"


@pytest.mark.parametrize("raised", [PeerDied("the card is gone"), Cancelled("I feel like it")])
def test_an_engine_that_raises_our_errors_fails_all_the_same(raised: Exception) -> None:
    def fail(layer: int) -> None:
        raise raised

    engine = LocalEngine()
    engine.at_layer = fail
    with alone(engine) as owner:
        request = owner.submit(prompt(1), ask())
        owner.run_until_done(request)
        assert (request.outcome, request.cause) == ("failed", "source-failed")
        assert request.reason in (
            "PeerDied: the card is gone",
            "the engine gave up an attempt that nobody cancelled",
        )


class Stubborn(LocalEngine):
    """Takes no exception for an answer."""

    def compute(self, tokens: Sequence[int], sink: PrefillSink, start: int) -> None:
        for _ in range(3):
            with suppress(Cancelled, LocalProtocolError):
                super().compute(tokens, sink, start)


@pytest.mark.parametrize("kind", [LocalEngine, Stubborn])
def test_an_error_of_the_owner_passes_through_the_engine(kind: type[LocalEngine]) -> None:
    """Such as that its router is gone: the engine stops, then the turn raises it."""

    def gone() -> None:
        raise PeerDied("the router is gone")

    engine = kind()
    with alone(engine) as owner, pipe(owner, gone) as trigger:
        engine.at_layer = lambda layer: trigger() if layer == 1 else None
        request = owner.submit(prompt(1), ask())
        with pytest.raises(PeerDied, match="the router is gone"):
            owner.turn(1.0)
        assert (request.outcome, request.cause) == ("failed", "source-failed")


def test_an_interrupt_is_raised_and_leaves_the_owner_whole() -> None:
    def interrupt(layer: int) -> None:
        if layer == 2:
            raise KeyboardInterrupt

    engine = LocalEngine()
    engine.at_layer = interrupt
    with alone(engine) as owner:
        request = owner.submit(prompt(1), ask())
        with pytest.raises(KeyboardInterrupt):
            owner.turn(1.0)
        assert request.reason == "interrupted by KeyboardInterrupt"
        engine.at_layer = lambda layer: None
        after = owner.submit(prompt(2), ask())
        owner.run_until_done(after)
        assert after.outcome == "finished"


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("kind", [Failed, Released])
def test_what_an_interrupt_kept_from_being_told_is_told_by_the_next_turn(
    monkeypatch: pytest.MonkeyPatch, kind: type[FromSource], heard: bool
) -> None:
    """Else its only slot would never be free; what was heard already does no harm."""
    with alone(LocalEngine(fail_at_layer=3)) as owner:
        take = owner._sources._take
        interrupts = [KeyboardInterrupt()]

        def interrupted(source: SourceId, message: FromSource) -> None:
            if isinstance(message, kind) and interrupts:
                if heard:
                    take(source, message)
                raise interrupts.pop()
            take(source, message)

        monkeypatch.setattr(owner._sources, "_take", interrupted)
        request = owner.submit(prompt(1), ask())
        with pytest.raises(KeyboardInterrupt):
            owner.turn(1.0)
        assert owner.next_turn_s() == 0.0
        owner.turn(1.0)
        assert (request.outcome, request.cause) == ("failed", "source-failed")
        assert owner.idle
        assert owner.next_turn_s() is None


def test_an_error_of_the_owner_is_not_hidden_by_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone() -> None:
        raise PeerDied("the router is gone")

    engine = LocalEngine()
    with alone(engine) as owner, pipe(owner, gone) as trigger:
        engine.at_layer = lambda layer: trigger() if layer == 1 else None
        take = owner._sources._take
        interrupts = [KeyboardInterrupt()]

        def interrupted(source: SourceId, message: FromSource) -> None:
            if isinstance(message, Released) and interrupts:
                raise interrupts.pop()
            take(source, message)

        monkeypatch.setattr(owner._sources, "_take", interrupted)
        owner.submit(prompt(1), ask())
        with pytest.raises(PeerDied, match="the router is gone") as caught:
            owner.turn(1.0)
        assert isinstance(caught.value.__cause__, KeyboardInterrupt)


@pytest.mark.parametrize("call", ["turn", "close", "drain"])
def test_a_callback_may_not_turn_or_close_its_owner(call: str) -> None:
    """Its own request pays for it."""
    with alone(LocalEngine()) as owner:

        def again(*_: object) -> None:
            getattr(owner, call)()

        request = owner.submit(prompt(1), ask(), on_progress=again)
        owner.run_until_done(request)
        assert request.outcome == "cancelled"
        assert "its callback raised LocalProtocolError" in request.reason


def test_the_books_are_checked_whenever_the_owner_comes_to_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once; and when they do not add up, that is no warning."""
    checks: list[int] = []
    with alone(LocalEngine()) as owner:
        check = owner._machine.check_integrity

        def counted() -> None:
            checks.append(1)
            check()

        monkeypatch.setattr(owner._machine, "check_integrity", counted)
        for count in (1, 2):
            owner.run_until_done(owner.submit(prompt(1), ask()))
            for _ in range(5):
                owner.turn(0.0)
            assert len(checks) == count
        owner.submit(prompt(1), ask())
        owner._machine._lanes_quarantined += 1
        with pytest.raises(LocalProtocolError, match="are not 2 in all"):
            owner.drain()
        assert "do not add up" in caplog.text
        owner._machine._lanes_quarantined -= 1


def test_an_engine_that_cannot_prove_to_be_quiet_keeps_its_slot() -> None:
    """This process cannot die to prove it: the slot goes to quarantine and is not granted again."""
    engine = LocalEngine()
    with alone(engine, drain_timeout_s=0.2) as owner:

        def fail(layer: int) -> None:
            raise Unquiet("copies into it may be in flight")

        engine.at_layer = fail
        request = owner.submit(prompt(1), ask())
        owner.run_until_done(request)
        assert (request.outcome, request.cause) == ("failed", "source-failed")
        assert "copies into it may be in flight" in request.reason
        assert owner.statistics()["slots"]["free"] == 0
        waiting = owner.submit(prompt(2), ask())
        owner.run_until_done(waiting)
        assert (waiting.outcome, waiting.cause) == ("failed", "no-source")
        assert owner.statistics()["slots"]["quarantined"] == 1
        with pytest.raises(Refused):
            owner.submit(prompt(3), ask())
        assert engine.runs == 1
