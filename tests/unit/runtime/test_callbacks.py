"""Callbacks run inside an owner's turn: what they raise or ask for ends their own request only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace import DecoderOwner, Entry, NullDecoder, RequestOptions, SourceHandle, decoder_like
from headrace.errors import Closed, LocalProtocolError, WouldBlock
from headrace.runtime.requests import Request

CONTEXT = 64
PROMPT = list(range(20))


class CountingDecoder(NullDecoder):
    """Decodes: each row's largest logit is at the number of steps so far, so tokens count up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caps = type(self.caps)(max_lanes=self.caps.max_lanes)
        self.steps = 0
        self.fault: Exception | None = None

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        from array import array

        if self.fault is not None:
            raise self.fault
        self.steps += 1
        row = [0.0] * self.manifest().vocab_size
        row[self.steps % len(row)] = 1.0
        return [memoryview(array("f", row)) for _ in active]


@pytest.fixture
def owner() -> Iterator[DecoderOwner]:
    source = SourceHandle("replay", {"layers": 4})
    source.start()
    decoder = CountingDecoder(decoder_like(source.manifest), context=CONTEXT, lanes=2)
    owner = DecoderOwner(decoder, context=CONTEXT)
    owner.attach(source)
    yield owner
    owner.close()


def finish(owner: DecoderOwner, *requests: Request) -> None:
    owner.run_until_done(*requests)
    assert owner.drain()
    owner.check_integrity()
    assert owner.statistics()["lanes"]["held"] == 0


def boom(*_: object) -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_raising_on_token_fails_its_request(owner: DecoderOwner, max_tokens: int) -> None:
    broken = owner.submit(PROMPT, RequestOptions(max_tokens=max_tokens), on_token=boom)
    neighbour = owner.submit(PROMPT, RequestOptions(max_tokens=3))
    finish(owner, broken, neighbour)
    assert broken.outcome == "failed"
    assert "boom" in broken.reason
    assert neighbour.outcome == "finished"
    assert owner.statistics()["lanes"]["free"] == 2


def test_a_raising_on_progress_ends_its_request(owner: DecoderOwner) -> None:
    options = RequestOptions(route="streamed", max_tokens=3)
    broken = owner.submit(PROMPT, options, on_progress=boom)
    neighbour = owner.submit(PROMPT, options)
    finish(owner, broken, neighbour)
    assert (broken.outcome, neighbour.outcome) == ("cancelled", "finished")
    assert "boom" in broken.reason


@pytest.mark.parametrize("at", [1, 2, 4])
def test_on_token_may_cancel_its_request_twice(owner: DecoderOwner, at: int) -> None:
    def stop(token: int) -> None:
        if len(request.tokens) == at:
            owner.cancel(request)
            owner.cancel(request)

    request = owner.submit(PROMPT, RequestOptions(max_tokens=30), on_token=stop)
    neighbour = owner.submit(PROMPT, RequestOptions(max_tokens=6))
    finish(owner, request, neighbour)
    assert request.outcome == "cancelled"
    assert len(request.tokens) == at
    assert len(neighbour.tokens) == 6


def test_on_progress_may_cancel_and_submit(owner: DecoderOwner) -> None:
    later: list[Request] = []

    def stop(*_: object) -> None:
        owner.cancel(request)
        owner.cancel(request)
        if not later:
            later.append(owner.submit(PROMPT, RequestOptions(max_tokens=2)))

    options = RequestOptions(route="streamed", max_tokens=3)
    request = owner.submit(PROMPT, options, on_progress=stop)
    owner.run_until_done(request)
    finish(owner, *later)
    assert (request.outcome, later[0].outcome) == ("cancelled", "finished")


@pytest.mark.parametrize("fault", [RuntimeError("CUDA error"), LocalProtocolError("a bug")])
def test_whatever_a_decode_step_raises_sets_its_lane_apart(
    owner: DecoderOwner, fault: Exception
) -> None:
    decoder = owner._decoder
    assert isinstance(decoder, CountingDecoder)
    decoder.fault = fault
    request = owner.submit(PROMPT, RequestOptions(max_tokens=3))
    owner.run_until_done(request)
    assert (request.outcome, request.reason) == ("failed", str(fault))
    decoder.fault = None
    finish(owner, owner.submit(PROMPT, RequestOptions(max_tokens=3)))
    assert owner.statistics()["lanes"] == {"free": 1, "quarantined": 1, "held": 0}


@pytest.mark.parametrize("name", ["begin_import", "publish", "read"])
@pytest.mark.parametrize("fault", [RuntimeError, LocalProtocolError, WouldBlock])
def test_whatever_a_decoder_raises_is_a_fault_of_its_device(
    owner: DecoderOwner, monkeypatch: pytest.MonkeyPatch, name: str, fault: type[Exception]
) -> None:
    """Its lane is set apart, the text is the reason, and the owner serves on."""

    def fail(*_: object) -> None:
        raise fault("CUDA error")

    monkeypatch.setattr(owner._decoder, name, fail)
    request = owner.submit(PROMPT, RequestOptions(max_tokens=1, audit=True))
    owner.run_until_done(request)
    assert (request.outcome, request.reason) == ("failed", "CUDA error")
    monkeypatch.undo()
    after = owner.submit(PROMPT, RequestOptions(max_tokens=3))
    owner.run_until_done(after)
    assert after.outcome == "finished"
    assert owner.statistics()["lanes"] == {"free": 1, "quarantined": 1, "held": 0}


def test_a_fence_that_raises_anything_is_a_fault_of_its_device(
    owner: DecoderOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fence:
        asked = 0

        def done(self) -> bool:
            self.asked += 1
            if self.asked > 1:
                raise KeyError("event")
            return False

    monkeypatch.setattr(owner._decoder, "begin_import", lambda *_: Fence())
    request = owner.submit(PROMPT, RequestOptions(max_tokens=1))
    owner.run_until_done(request)
    assert (request.outcome, request.reason) == ("failed", "'event'")
    assert owner.statistics()["lanes"] == {"free": 1, "quarantined": 1, "held": 0}


def test_a_lane_that_is_not_freed_is_out_of_service(
    owner: DecoderOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner._decoder, "free", boom)
    request = owner.submit(PROMPT, RequestOptions(max_tokens=1))
    owner.run_until_done(request)
    assert request.outcome == "finished"
    monkeypatch.undo()
    finish(owner, owner.submit(PROMPT, RequestOptions(max_tokens=1)))
    assert owner.statistics()["lanes"]["free"] == 1


def test_a_reservation_that_raises_anything_fails_and_the_owner_closes(
    owner: DecoderOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner._decoder, "reserve", boom)
    request = owner.submit(PROMPT, RequestOptions())
    owner.run_until_done(request)
    assert (request.outcome, request.reason) == ("failed", "boom")


def test_a_closed_owner_says_so(owner: DecoderOwner) -> None:
    request = owner.submit(PROMPT, RequestOptions(max_tokens=0, hold=True))
    owner.run_until_done(request)
    with pytest.raises(LocalProtocolError, match="no part 7"):
        owner.read(request, 0, 7)
    with pytest.raises(LocalProtocolError, match="layer -1"):
        owner.read(request, -1, 0)
    owner.close()
    owner.close()
    for call in (owner.turn, lambda: owner.submit(PROMPT), lambda: owner.cancel(request)):
        with pytest.raises(Closed):
            call()


def test_the_budget_of_a_turn_can_be_set() -> None:
    source = SourceHandle("replay", {"layers": 4})
    source.start()
    decoder = NullDecoder(decoder_like(source.manifest), context=CONTEXT, lanes=1)
    owner = DecoderOwner(decoder, context=CONTEXT, chunk_nbytes=1024, budget_nbytes=1)
    try:
        owner.attach(source)
        request = owner.submit(PROMPT, RequestOptions(max_tokens=0, trace=True))
        while not request.done:
            before = len(request.imports)
            owner.turn(1.0)
            assert len(request.imports) <= before + 1
    finally:
        owner.close()
