"""A step of several entries: turns, and what one entry's token, end or fault does to the others."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from headrace.backends.base import Caps, Decoder, Entry
from headrace.errors import DeviceError
from headrace.ids import AttemptId, RequestId
from headrace.messages import Sampling
from headrace.protocol.commands import Cause
from headrace.protocol.owner import Owner
from headrace.runtime.active import Active
from headrace.runtime.decoding import Decoding
from headrace.runtime.requests import Request, RequestOptions

VOCAB = 50
Step = list[tuple[int, int]]  # lanes and the tokens that they were fed


class Counting:
    """A decoder whose token in lane L after k steps is 10 L + k, each row a function of these."""

    def __init__(self, decode_batch: int) -> None:
        self.caps = Caps(max_lanes=9, decode_batch=decode_batch)
        self.steps: list[Step] = []
        self.fault: BaseException | None = None
        self.unusable: set[int] = set()  # lanes whose rows are NaN
        self.num_rows: int | None = None
        self._counts: dict[int, int] = {}

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        if self.fault is not None:
            raise self.fault
        self.steps.append([(entry.lane, token) for entry, token in active])
        rows = []
        for entry, _ in active:
            self._counts[entry.lane] = self._counts.get(entry.lane, 0) + 1
            rows.append(self._row(entry.lane, self._counts[entry.lane]))
        return rows[: self.num_rows]

    def _row(self, lane: int, count: int) -> memoryview:
        if lane in self.unusable:
            return memoryview(array("f", [math.nan] * VOCAB))
        at = (10 * lane + count) % VOCAB
        return memoryview(array("f", [-0.05 * abs(each - at) for each in range(VOCAB)]))

    @property
    def lanes(self) -> list[list[int]]:
        """The lanes of each step."""
        return [[lane for lane, _ in step] for step in self.steps]


class Retiring:
    """Of the owner's machine what decoding needs: who was retired, and who was set apart."""

    def __init__(self) -> None:
        self.retired: list[int] = []
        self.apart: list[int] = []

    def retire(self, request: RequestId, now_ns: int, reason: str = "") -> None:
        (self.apart if reason else self.retired).append(request.counter)


class Stand:
    """Entries in lanes 0, 1, 2, ... that decode, each after a first token of 10 times its lane."""

    def __init__(self, decode_batch: int) -> None:
        self.decoder = Counting(decode_batch)
        self.machine = Retiring()
        self.actives: dict[AttemptId, Active] = {}
        decoder, machine = cast(Decoder, self.decoder), cast(Owner, self.machine)
        self.decoding = Decoding(machine, decoder, self.actives, lambda: None)

    def add(
        self,
        num_tokens: int = 9,
        *,
        on_token: Callable[[int], None] | None = None,
        sampling: Sampling | None = None,
        stop_tokens: tuple[int, ...] = (),
    ) -> Request:
        active = self.active(num_tokens, on_token, sampling or Sampling(), stop_tokens)
        self.decoding.begin(active, 10 * active.entry.lane, memoryview(b""))
        return active.request

    def begin(self, options: RequestOptions, logits: memoryview) -> Request:
        """An entry whose first token is chosen from `logits`."""
        active = self._entry(options, None)
        self.decoding.begin(active, None, logits)
        return active.request

    def active(
        self,
        num_tokens: int,
        on_token: Callable[[int], None] | None,
        sampling: Sampling,
        stop_tokens: tuple[int, ...],
    ) -> Active:
        options = RequestOptions(max_tokens=num_tokens, sampling=sampling, stop_tokens=stop_tokens)
        return self._entry(options, on_token)

    def _entry(self, options: RequestOptions, on_token: Callable[[int], None] | None) -> Active:
        lane = len(self.actives)
        request = Request(RequestId(1, lane), 3, options, on_token)
        attempt = AttemptId(1, lane, 1)
        active = self.actives[attempt] = Active(attempt, request, [1, 2, 3])
        active.held = Entry(lane, 3, 1)
        return active

    def cancel(self, request: Request) -> None:
        """As an owner does, from within a callback."""
        active = self.actives[AttemptId(*request.request, 1)]
        self.decoding.finish(active, "cancelled", "by a callback", Cause.CANCELLED)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.decoding:
                self.decoding.step()


def counted(lane: int, count: int) -> list[int]:
    """The first tokens of an entry in `lane`."""
    return [10 * lane + at for at in range(count)]


# Turns.


@pytest.mark.parametrize(
    ("batch", "entries", "lanes"),
    [
        (1, 2, [[0], [1], [0], [1]]),
        (2, 1, [[0], [0]]),
        (2, 3, [[0, 1], [2, 0], [1, 2], [0, 1]]),
        (3, 5, [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]),
        (4, 3, [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_entries_take_turns_in_groups(batch: int, entries: int, lanes: list[list[int]]) -> None:
    stand = Stand(batch)
    requests = [stand.add() for _ in range(entries)]
    stand.run(len(lanes))
    assert stand.decoder.lanes == lanes
    for lane, request in enumerate(requests):
        taken = sum(step.count(lane) for step in lanes)
        assert request.tokens == counted(lane, taken + 1)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("entries", [1, 2, 5, 7])
def test_nobody_waits_longer_than_a_round(batch: int, entries: int) -> None:
    stand = Stand(batch)
    for _ in range(entries):
        stand.add(40)
    stand.run(20)
    round_steps = -(-entries // batch)
    for at in range(len(stand.decoder.lanes) - round_steps + 1):
        together = stand.decoder.lanes[at : at + round_steps]
        assert {lane for step in together for lane in step} == set(range(entries))
    assert all(len(step) == min(batch, entries) for step in stand.decoder.lanes)


def test_entries_join_and_leave_between_steps() -> None:
    stand = Stand(4)
    first = stand.add(5)
    stand.run(2)
    second, third = stand.add(3), stand.add(9)
    stand.run(3)
    assert stand.decoder.lanes == [[0], [0], [0, 1, 2], [0, 1, 2], [2]]
    assert [first.outcome, second.outcome, third.outcome] == ["finished", "finished", ""]
    assert (first.tokens, second.tokens) == (counted(0, 5), counted(1, 3))
    assert stand.machine.retired == [0, 1]
    assert len(stand.decoding) == 1


def test_a_callback_may_begin_another_in_the_middle_of_a_step() -> None:
    stand = Stand(4)
    later: list[Request] = []

    def begin(token: int) -> None:
        if token == 1:
            later.append(stand.add())

    stand.add(on_token=begin)
    stand.add()
    stand.run(2)
    assert stand.decoder.lanes == [[0, 1], [0, 1, 2]]
    assert later[0].tokens == counted(2, 2)


def test_each_is_fed_its_own_last_token() -> None:
    stand = Stand(2)
    for _ in range(3):
        stand.add()
    stand.run(3)
    assert stand.decoder.steps == [[(0, 0), (1, 10)], [(2, 20), (0, 1)], [(1, 11), (2, 21)]]


def test_a_stop_token_ends_its_own_request_in_the_step() -> None:
    stand = Stand(3)
    one, other = stand.add(stop_tokens=(2,)), stand.add()
    stand.run(4)
    assert (one.tokens, one.outcome) == (counted(0, 3), "finished")
    assert other.tokens == counted(1, 5)


# Callbacks.


@pytest.mark.parametrize("canceller", [0, 1, 2])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_token_may_cancel_another_of_its_step(canceller: int, victim: int) -> None:
    """What comes before in the step has its token; what comes after gets none any more."""
    stand = Stand(4)
    requests: list[Request] = []

    def cancel(token: int) -> None:
        if token == 10 * canceller + 2:
            stand.cancel(requests[victim])

    for lane in range(3):
        requests.append(stand.add(5, on_token=cancel if lane == canceller else None))
    stand.run(5)
    assert [request.outcome for request in requests] == [
        "cancelled" if lane == victim else "finished" for lane in range(3)
    ]
    for lane, request in enumerate(requests):
        taken = (2 if lane > canceller else 3) if lane == victim else 5
        assert request.tokens == counted(lane, taken)
    assert sorted(stand.machine.retired) == [0, 1, 2]
    assert len(stand.decoding) == 0


def test_a_callback_that_raises_ends_its_own_request() -> None:
    stand = Stand(3)

    def boom(token: int) -> None:
        if token == 11:
            raise ValueError("boom")

    requests = [stand.add(4, on_token=boom if lane == 1 else None) for lane in range(3)]
    stand.run(4)
    assert [request.outcome for request in requests] == ["finished", "failed", "finished"]
    assert "boom" in requests[1].reason
    assert stand.machine.apart == []
    assert [request.tokens for request in requests] == [
        counted(0, 4),
        counted(1, 2),
        counted(2, 4),
    ]


@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_an_interrupt_in_a_callback_loses_no_token_of_the_others(interrupted: int) -> None:
    """Their lanes have advanced: the next step takes their tokens before it computes again."""
    stand = Stand(3)

    def interrupt(token: int) -> None:
        if token == 10 * interrupted + 2:
            raise KeyboardInterrupt

    requests = [
        stand.add(5, on_token=interrupt if lane == interrupted else None) for lane in range(3)
    ]
    stand.run(1)
    with pytest.raises(KeyboardInterrupt):
        stand.run(1)
    stand.run(6)
    for lane, request in enumerate(requests):
        assert (request.outcome, request.tokens) == ("finished", counted(lane, 5))


def test_an_interrupt_in_the_last_token_ends_the_request_with_it() -> None:
    stand = Stand(2)

    def interrupt(token: int) -> None:
        if token == 2:
            raise KeyboardInterrupt

    requests = [stand.add(3, on_token=interrupt), stand.add(4)]
    with pytest.raises(KeyboardInterrupt):
        stand.run(4)
    assert (requests[0].outcome, requests[0].tokens) == ("finished", counted(0, 3))
    stand.run(3)
    assert (requests[1].outcome, requests[1].tokens) == ("finished", counted(1, 4))
    assert stand.machine.retired == [0, 1]


# Faults.


def test_a_row_that_holds_no_choice_fails_its_own_request() -> None:
    stand = Stand(3)
    requests = [stand.add(4) for _ in range(3)]
    stand.decoder.unusable = {1}
    stand.run(4)
    assert [request.outcome for request in requests] == ["finished", "failed", "finished"]
    assert (requests[1].cause, requests[1].tokens) == (Cause.DEVICE.value, counted(1, 1))
    assert "NaN" in requests[1].reason
    assert stand.machine.apart == []  # its lane is quiet: the step ended
    assert sorted(stand.machine.retired) == [0, 1, 2]


@pytest.mark.parametrize("fault", [DeviceError("lost"), RuntimeError("lost"), KeyboardInterrupt()])
def test_a_fault_of_the_device_fails_all_of_its_step_and_nobody_else(
    fault: BaseException,
) -> None:
    stand = Stand(2)
    requests = [stand.add(3) for _ in range(3)]
    stand.decoder.fault = fault
    if isinstance(fault, Exception):
        stand.run(1)
    else:
        with pytest.raises(KeyboardInterrupt):
            stand.run(1)
    assert [request.outcome for request in requests] == ["failed", "failed", ""]
    assert all(request.cause == Cause.DEVICE.value for request in requests[:2])
    assert stand.machine.apart == [0, 1]
    stand.decoder.fault = None
    stand.run(2)
    assert (requests[2].outcome, requests[2].tokens) == ("finished", counted(2, 3))
    assert stand.machine.retired == [2]


def test_rows_that_do_not_count_up_are_a_fault_of_the_device() -> None:
    """Nobody knows whose they are."""
    stand = Stand(3)
    requests = [stand.add(4) for _ in range(3)]
    stand.decoder.num_rows = 2
    stand.run(1)
    assert [request.outcome for request in requests] == ["failed"] * 3
    assert "3 entries gave 2 rows" in requests[0].reason
    assert stand.machine.apart == [0, 1, 2]


# Sampling.


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    """Each request draws from a generator of its own, in the order of its own tokens."""

    def drawn(batch: int, seeds: Sequence[int], joins: int) -> list[list[int]]:
        stand = Stand(batch)
        requests = []
        for seed in seeds:
            requests.append(stand.add(20, sampling=Sampling(1.0, 1.0, 0, seed)))
            stand.run(joins)
        stand.run(100)
        assert all(len(request.tokens) == 20 for request in requests)
        return [request.tokens for request in requests]

    wanted = drawn(1, (7, 8, 9), 0)
    assert len(set(map(tuple, wanted))) == 3
    for batch in (2, 3, 4):
        for joins in (0, 1, 3):
            assert drawn(batch, (7, 8, 9), joins) == wanted


# What is recorded.


def test_a_step_is_recorded_for_those_in_it_and_as_a_neighbours_for_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Stand(2)
    for _ in range(3):
        stand.add()
    waiting = stand.active(3, None, Sampling(), ())
    told: list[tuple[str, int]] = []
    for attempt, active in stand.actives.items():
        record, lane = active.record, attempt.counter
        monkeypatch.setattr(record, "decoded", lambda *_, lane=lane: told.append(("own", lane)))
        seen = ("neighbour", lane)
        monkeypatch.setattr(record, "neighbour_decoded", lambda *_, seen=seen: told.append(seen))
    stand.run(1)
    assert [lane for kind, lane in told if kind == "own"] == [0, 1]
    assert ("neighbour", waiting.attempt.counter) in told


# Logprobs.


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_every_token_has_its_logprobs_if_they_are_asked_for(logprobs: int | None) -> None:
    """The first one included, which is chosen from the source's row."""
    stand = Stand(1)
    options = RequestOptions(max_tokens=4, logprobs=logprobs)
    request = stand.begin(options, stand.decoder._row(0, 0))
    stand.run(3)
    assert request.outcome == "finished"
    assert request.tokens == counted(0, 4)
    if logprobs is None:
        assert request.logprobs == []
        return
    assert len(request.logprobs) == 4
    for token, (logprob, top) in zip(request.tokens, request.logprobs, strict=True):
        assert len(top) == logprobs
        assert top[:1] in ((), ((token, logprob),))


def test_a_callback_finds_the_logprobs_of_its_token() -> None:
    stand, told = Stand(1), list[tuple[int, int]]()
    options = RequestOptions(max_tokens=3, logprobs=1)

    def count(token: int) -> None:
        told.append((token, request.logprobs[-1].top[0][0]))

    request = stand.begin(options, stand.decoder._row(0, 0))
    request.on_token = count
    stand.run(2)
    assert told == [(1, 1), (2, 2)]
