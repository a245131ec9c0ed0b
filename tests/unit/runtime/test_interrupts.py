"""What a callback or an interrupt does in the middle of a batch of commands leaves nothing undone.

The decoder copies late: imports are fenced together when it is let go, so that several requests
are published in one batch of commands.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from headrace import DecoderOwner, Entry, NullDecoder, RequestOptions, SourceHandle, decoder_like
from headrace.backends.base import Fence, Reservation, SlotView
from headrace.errors import DeviceError, Refused, WouldBlock
from headrace.plan import Copy
from headrace.runtime.requests import Request

CONTEXT = 64
LANES = 3
PROMPT = list(range(20))
CALLS = ("reserve", "begin_import", "done", "publish", "free", "decode_step", "read")


class Late:
    def __init__(self, decoder: LateDecoder, fence: Fence) -> None:
        self._decoder, self._fence = decoder, fence

    def done(self) -> bool:
        self._decoder.called("done")
        return not self._decoder.holds and self._fence.done()


class LateDecoder(NullDecoder):
    """Fences nothing while it `holds`; raises `error` at the `nth` call of `name`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caps = type(self.caps)(max_lanes=self.caps.max_lanes)
        self.holds = False
        self.name, self.nth = "", 0
        self.error: type[BaseException] = KeyboardInterrupt

    def called(self, name: str) -> None:
        if name == self.name:
            self.nth -= 1
            if self.nth == 0:
                raise self.error("in the middle")

    def reserve(self, num_tokens: int) -> Reservation:
        self.called("reserve")
        return super().reserve(num_tokens)

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Late:
        self.called("begin_import")
        return Late(self, super().begin_import(reservation, slot, copies))

    def read(self, *arguments: Any) -> bytes | memoryview:
        self.called("read")
        return super().read(*arguments)

    def publish(self, reservation: Reservation) -> Entry:
        self.called("publish")
        return super().publish(reservation)

    def free(self, held: Reservation | Entry) -> None:
        self.called("free")
        super().free(held)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        from array import array

        self.called("decode_step")
        return [memoryview(array("f", [1.0] * self.manifest().vocab_size)) for _ in active]


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[DecoderOwner, LateDecoder]]:
    source = SourceHandle("replay", {"layers": 4}, num_slots=LANES)
    source.start()
    decoder = LateDecoder(decoder_like(source.manifest), context=CONTEXT, lanes=LANES)
    owner = DecoderOwner(decoder, context=CONTEXT)
    owner.attach(source)
    yield owner, decoder
    owner.close()


def settle(owner: DecoderOwner, decoder: LateDecoder, requests: Sequence[Request]) -> None:
    """All end, once; what is apart is reinstated; then everything is free."""
    decoder.holds, decoder.name = False, ""
    owner.run_until_done(*requests)
    for attempt in owner.quarantined():
        owner.reinstate(attempt)
    assert owner.drain()
    owner.check_integrity()
    assert owner.statistics()["lanes"] == {"free": LANES, "quarantined": 0, "held": 0}
    assert decoder.statistics()["free"] == LANES
    again = owner.submit(PROMPT, RequestOptions(max_tokens=2))
    owner.run_until_done(again)
    assert (again.outcome, len(again.tokens)) == ("finished", 2)
    assert owner.drain()


def held_back(
    owner: DecoderOwner, decoder: LateDecoder, on_token: Callable[[int], None] | None, **asked: Any
) -> list[Request]:
    """As many requests as there are lanes, all imports begun and none fenced."""
    decoder.holds = True
    options = RequestOptions(**{"max_tokens": 3, **asked})
    requests = [owner.submit(PROMPT, options, on_token=on_token) for _ in range(LANES)]
    while owner.statistics()["handoffs"].get("sealed", 0) < LANES:
        owner.turn(0.05)
    return requests


@pytest.mark.parametrize("victim", range(LANES))
def test_the_first_token_of_one_cancels_the_others(
    made: tuple[DecoderOwner, LateDecoder], victim: int
) -> None:
    owner, decoder = made
    requests: list[Request] = []

    def first_wins(token: int) -> None:
        owner.cancel(requests[victim])

    requests += held_back(owner, decoder, first_wins)
    settle(owner, decoder, requests)
    outcomes = [request.outcome for request in requests]
    assert outcomes.count("cancelled") == 1
    assert outcomes[victim] == "cancelled"


def test_callbacks_cancel_at_random(made: tuple[DecoderOwner, LateDecoder]) -> None:
    owner, decoder = made
    for seed in range(20):
        rng, requests = random.Random(seed), list[Request]()

        def cancel_some(
            token: int, rng: random.Random = rng, all_of: list[Request] = requests
        ) -> None:
            owner.cancel(rng.choice(all_of))
            if len(all_of) < 2 * LANES:
                all_of.append(owner.submit(PROMPT, RequestOptions(max_tokens=2)))

        requests += held_back(owner, decoder, cancel_some)
        settle(owner, decoder, requests)


@pytest.mark.parametrize("error", [WouldBlock, DeviceError, KeyboardInterrupt])
def test_a_reserve_fails_that_a_callback_made_moot(
    made: tuple[DecoderOwner, LateDecoder], error: type[BaseException]
) -> None:
    owner, decoder = made
    waiting: list[Request] = []

    def cancel_who_waits(token: int) -> None:
        for request in waiting:
            owner.cancel(request)

    requests = held_back(owner, decoder, cancel_who_waits)
    waiting.append(owner.submit(PROMPT, RequestOptions(max_tokens=1)))
    decoder.name, decoder.nth, decoder.error = "reserve", 1, error
    owner.cancel(requests[-1])  # frees a lane for the one that waits, when its imports are fenced
    decoder.holds = False
    for _ in range(3):
        try:
            owner.run_until_done(*requests, *waiting)
        except KeyboardInterrupt:
            continue
    settle(owner, decoder, [*requests, *waiting])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_interrupt_inside_the_decoder_loses_nothing(
    made: tuple[DecoderOwner, LateDecoder], call: str, nth: int
) -> None:
    owner, decoder = made
    requests = held_back(owner, decoder, None, digest=call == "read") if call != "reserve" else []
    if call == "begin_import":  # of those that were held back all are begun
        settle(owner, decoder, requests)
        requests = []
    decoder.name, decoder.nth, decoder.error = call, nth, KeyboardInterrupt
    decoder.holds = False
    interrupts = 0
    for _ in range(nth + 4):
        try:
            if not requests:
                for _ in range(nth):
                    requests.append(owner.submit(PROMPT, RequestOptions(max_tokens=3)))
            owner.run_until_done(*requests)
            owner.turn()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    settle(owner, decoder, requests)


def test_an_interrupt_inside_the_first_token_ends_its_request(
    made: tuple[DecoderOwner, LateDecoder],
) -> None:
    owner, decoder = made

    def interrupt(token: int) -> None:
        raise KeyboardInterrupt

    request = owner.submit(PROMPT, RequestOptions(max_tokens=3), on_token=interrupt)
    with pytest.raises(KeyboardInterrupt):
        owner.run_until_done(request)
    assert request.outcome == "cancelled"
    settle(owner, decoder, [request])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget_nbytes", 0),
        ("budget_nbytes", -1),
        ("chunk_nbytes", 0),
        ("progress_timeout_s", 0.0),
        ("drain_timeout_s", -1.0),
        ("progress_timeout_s", float("nan")),
    ],
)
def test_bounds_that_bound_nothing_are_refused(
    made: tuple[DecoderOwner, LateDecoder], name: str, value: Any
) -> None:
    _, decoder = made
    with pytest.raises(Refused, match=name):
        DecoderOwner(decoder, context=CONTEXT, **{name: value})
