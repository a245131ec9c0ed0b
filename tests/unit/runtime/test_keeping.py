"""Kept prompts at the shell: what a decoder that fails may do to them, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.backends.base import Entry, Kept, Reservation
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import DeviceError, LocalProtocolError, Refused
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions

CONTEXT = 64
STORAGE = 1000
PROMPT = list(range(20))


class Keeper(NullDecoder):
    """The null decoder, which keeps what it published as bytes; `fail` names what raises."""

    def __init__(self, *, lanes: int = 2, keeps: int = 2) -> None:
        source = open_replay({"layers": 3, "heads": 2, "head_dim": 4})
        manifest = decoder_like(source.manifest())
        super().__init__(manifest, context=CONTEXT, lanes=lanes)
        source.close()
        self.keeps_nbytes = keeps * STORAGE
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
        return kept

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

    def publish(self, reservation: Reservation) -> Entry:
        self._may("publish")
        return super().publish(reservation)

    def evict(self, kept: Kept) -> None:
        self._may("evict")
        del self.kept[kept.serial]
        self.evicted.append(kept)


@contextmanager
def owner_of(decoder: NullDecoder) -> Iterator[DecoderOwner]:
    engine = open_replay({"layers": 3, "heads": 2, "head_dim": 4})
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
        owner._keeping.lose(prompt.kept)
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
