"""First come, first served: told from an owner's commands alone, over random walks of one lane."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.ids import RequestId
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.books import Limits
from headrace.protocol.commands import Command, Report, Reserve, Retry, StartPrefill
from headrace.protocol.owner import Owner
from headrace.testing.fault_lab.bugs import find_bug
from tests.unit.protocol.builders import Shell
from tests.unit.protocol.test_random_walk import Walk

NUM_WALKS, NUM_STEPS = 40, 150


@dataclass
class Holding:
    """What an undecided request holds.

    since: when it began to wait as it does, counted in what was seen of its owner. parked_at: when
    it was parked. avoids: a source failed it, or it is for the owner's own engine; so a slot may
    not fit it.
    """

    since: int
    lane: bool = False
    slot: bool = False
    parked_at: int = 0
    avoids: bool = False

    @property
    def parked(self) -> bool:
        return self.slot and not self.lane


class FairOwner(Owner):
    """An owner each of whose grants is compared with those that older requests could have had."""

    seen: Counter[str]

    def __init__(self, epoch: int, limits: Limits) -> None:
        super().__init__(epoch, limits)
        self.holdings: dict[RequestId, Holding] = {}
        self.over: set[RequestId] = set()
        self.now = 0

    def submit(self, *args: Any, **options: Any) -> RequestId:
        request = super().submit(*args, **options)
        self.now += 1
        self._holding(request)
        return request

    def commands(self) -> list[Command]:
        given = super().commands()
        for command in given:
            self.now += 1
            match command:
                case Reserve(attempt=attempt):
                    self._lane_given(attempt.request)
                case StartPrefill(attempt=attempt, source=source):
                    self._slot_given(attempt.request, len(self._sources[source].slots))
                case Retry(attempt=attempt):
                    mine = self._holding(attempt.request)
                    mine.slot, mine.avoids = False, True
                    mine.since = self.now
                    self.seen["retried"] += 1
                case Report(request=request):
                    self.over.add(request)
                case _:
                    pass
        return given

    def _lane_given(self, request: RequestId) -> None:
        mine = self._holding(request)
        for other, theirs in self._undecided():
            if theirs.lane:
                continue
            if theirs.parked and not mine.slot:
                pytest.fail(f"{request} waits and has the lane before {other}, which is parked")
            if other < request and not (mine.slot and mine.parked_at < theirs.since):
                pytest.fail(f"{request} has the lane before {other}, which waited before")
        mine.lane = True
        self.seen["lane after parking" if mine.slot else "lane"] += 1

    def _slot_given(self, request: RequestId, num_slots: int) -> None:
        mine = self._holding(request)
        others = [each for each in self._undecided() if each[0] != request]
        if not mine.lane:
            self.seen["parked"] += 1
            if sum(h.parked for _, h in others) >= min(self.limits.prefetch_depth, num_slots - 1):
                pytest.fail(f"{request} is parked beyond the prefetch depth")
            if any(h.lane and not h.slot for _, h in others):
                pytest.fail(f"{request} is parked while one with storage lacks a slot")
        for other, theirs in others:
            if other > request or theirs.slot or theirs.lane != mine.lane:
                continue
            if not mine.lane:
                pytest.fail(f"{request} is parked before {other}, which waits")
            if not theirs.avoids:
                pytest.fail(f"{request} has a slot before {other}, which could have had it")
        mine.slot, mine.parked_at = True, self.now

    def _undecided(self) -> list[tuple[RequestId, Holding]]:
        return [(r, self._holding(r)) for r in sorted(self._requests) if r not in self.over]

    def _holding(self, request: RequestId) -> Holding:
        record = self._requests.get(request)
        holding = self.holdings.setdefault(request, Holding(self.now))
        holding.avoids |= record is not None and record.handoff.local
        return holding


class FairWalk(Walk):
    owner_type = FairOwner
    most_lanes = 1


def walk(faults: int, depths: set[int], seeds: range) -> Counter[str]:
    """What was seen in walks whose prefetch depth is one of `depths`."""
    FairOwner.seen = Counter()
    for seed in seeds:
        one = FairWalk(seed, faults)
        if one.ends.owner.limits.prefetch_depth in depths:
            one.run(NUM_STEPS)
            one.finish()
            FairOwner.seen["walks"] += 1
    return FairOwner.seen


@pytest.mark.parametrize("faults", [0, 10])
def test_no_younger_request_gets_the_lane_before_an_older_one_that_could_have_had_it(
    faults: int,
) -> None:
    seen = walk(faults, {0, 1, 2}, range(NUM_WALKS))
    assert seen["walks"] == NUM_WALKS
    assert seen["lane after parking"] > NUM_WALKS // 2
    assert seen["lane"] > NUM_WALKS
    assert bool(seen["retried"]) == bool(faults)


def test_with_depth_0_nobody_is_ever_parked() -> None:
    seen = walk(10, {0}, range(NUM_WALKS))
    assert seen["walks"] > 5
    assert seen["lane"] > 5 * seen["walks"] // 2
    assert seen["parked"] == seen["lane after parking"] == 0


def serve(shell: Shell, request: RequestId) -> None:
    """All of it up to publishing, as far as it is not there yet."""
    if shell.grants_of(request) and not shell.owner._requests[request].handoff.final:
        shell.prefill(request)
    shell.land()
    shell.publish(request)


@pytest.mark.parametrize(
    ("options", "fails"),
    [
        ({"local": True}, False),
        ({"start": 4}, False),
        ({"policy": FailurePolicy(num_attempts=1, local=True)}, True),
        ({"policy": FailurePolicy(num_attempts=2)}, True),
    ],
    ids=["local", "all kept", "local after its source failed", "at a source of one slot"],
)
def test_one_that_cannot_be_parked_has_the_lane_in_its_turn(
    options: dict[str, Any], fails: bool
) -> None:
    """Younger requests come for ever, and could be parked each time."""
    shell = Shell(lanes=1, slots=(2,), depth=1)
    shell.add_source(1, 1, local=options != {"policy": FailurePolicy(num_attempts=2)})
    holder = shell.submit()
    serve(shell, holder)
    request = shell.submit(**options)
    if fails:
        shell.failed(request)
        shell.released(request)
    served: list[RequestId] = []
    for _ in range(6):
        younger = shell.submit()
        shell.retire(holder)
        waiting = [each for each in (request, younger) if each not in served]
        holder = next(each for each in waiting if shell.owner._requests[each].handoff.has_storage)
        serve(shell, holder)
        served.append(holder)
        if holder == request:
            return
    pytest.fail(f"{request} was overtaken by {served}")


@pytest.mark.parametrize(
    "bug",
    [
        "a freed lane goes to a waiting hand-off first",
        "the youngest is served first",
        "a retry goes to the end of the queue",
        "more is parked than the prefetch depth",
        "parked although one with storage lacks a slot",
    ],
)
def test_a_bug_in_admission_is_unfair(bug: str) -> None:
    with find_bug(bug).planted(), pytest.raises(pytest.fail.Exception):
        walk(10, {0, 1, 2}, range(4 * NUM_WALKS))
