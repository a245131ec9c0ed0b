"""A random walk of an owner and its sources: queues that lag, and every fault at every moment."""

from __future__ import annotations

import random

import pytest

from headrace.errors import Refused
from headrace.geometry import Full, Shared, Sliding
from headrace.ids import AttemptId, SourceId
from headrace.messages import Prefill, Route
from headrace.protocol.books import Limits
from headrace.protocol.commands import Outcome
from headrace.protocol.handoff import HandoffState
from headrace.protocol.owner import Owner
from tests.unit.protocol.builders import CONTEXT, EPOCH, Ends, make_plan

KINDS = (Full(), Sliding(3, 2), Shared("layers.0"), Full())


def options_of(attempt: AttemptId) -> Prefill:
    """Each request its own route, cut and length, by its number."""
    at = attempt.counter
    routes: list[Route] = ["whole", "chunked", "streamed", "streamed"]
    return Prefill(
        attempt=attempt,
        slot=0,
        generation=0,
        num_tokens=1 + at % 5,
        route=routes[at % 4],
        group_layers=1 + at % 2,
        chunk=at % 3,
        prefill_chunk=0,
        emission="layers" if at % 8 < 4 else "cache_groups",
        digest=at % 3 == 0,
    )


class Walk:
    """One run of random steps, of which `faults` in a hundred are faults."""

    def __init__(self, seed: int, faults: int) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        limits = Limits(
            num_lanes=self.random.randint(1, 2),
            context=CONTEXT,
            prefetch_depth=self.random.randint(0, 2),
            chunk_nbytes=self.random.choice([1, 100, 1 << 20]),
            progress_timeout_ns=400,
            drain_timeout_ns=30,
        )
        self.ends = Ends(Owner(EPOCH, limits), lambda n: make_plan(n, *KINDS), options_of)
        self.num_submitted = 0
        for _ in range(self.random.randint(1, 2)):
            self.ends.add_source(self.random.randint(1, 3))

    def living(self) -> list[SourceId]:
        """The sources to go on with; where the last has died, a new one comes."""
        living = [id for id, source in self.ends.sources.items() if source.alive]
        return living or [self.ends.add_source(self.random.randint(1, 3))]

    def submit(self) -> None:
        options = options_of(AttemptId(EPOCH, self.num_submitted, 1))
        owner, now_ns = self.ends.owner, self.ends.now_ns
        if owner.no_lane_left or owner.no_slot_left:
            with pytest.raises(Refused):
                owner.submit(options.num_tokens, now_ns)
            return
        owner.submit(options.num_tokens, now_ns, digest=options.digest)
        self.num_submitted += 1
        self.ends.obey()

    def retire(self) -> None:
        entries = [
            r for r in self.ends.published if self.ends.owner.state_of(r) is HandoffState.PUBLISHED
        ]
        if entries:
            self.ends.owner.retire(self.random.choice(entries), self.ends.now_ns)
            self.ends.obey()

    def go_on(self) -> None:
        """A step as it should be."""
        ends, source = self.ends, self.random.choice(self.living())
        what = self.random.randrange(12)
        if what < 5:
            ends.sources[source].step()
        elif what < 8:
            ends.deliver(source)
        elif what == 8:
            ends.begin(self.random.choice([1, 1000]))
        elif what == 9 and ends.flights:
            ends.land(self.random.choice(list(ends.flights)))
        elif what == 10:
            self.retire()
        elif self.num_submitted < 8:
            self.submit()

    def go_wrong(self) -> None:
        ends, source = self.ends, self.random.choice(self.living())
        what = self.random.randrange(12)
        if what < 5:
            requests = list(ends.owner._requests)
            if requests:
                ends.owner.cancel(self.random.choice(requests), ends.now_ns)
                ends.obey()
        elif what < 7:
            ends.sources[source].step(broken=True)
        elif what == 7:
            ends.now_ns += self.random.choice([10, 50, 500])
            ends.owner.tick(ends.now_ns)
            ends.obey()
        elif what == 8 and ends.flights and self.random.random() < 0.3:
            ends.break_import(self.random.choice(list(ends.flights)))
        elif what == 9 and self.random.random() < 0.3:
            ends.add_source(self.random.randint(1, 3))
            ends.kill(source)
        elif what == 10:
            ends.refuses = True
        elif what == 11 and self.random.random() < 0.1:
            ends.loses = True

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.random.randrange(100) < self.faults:
                self.go_wrong()
            else:
                self.go_on()

    def finish(self) -> None:
        """No more faults, and time enough for everything to come to its end."""
        ends = self.ends
        ends.refuses = ends.loses = False
        self.come_to_rest()
        ends.now_ns += 10**6  # a slot that misses a read token is given up
        ends.owner.tick(ends.now_ns)
        ends.obey()
        self.come_to_rest()
        for source, end in ends.sources.items():
            free = all(slot.holder is None for slot in ends.owner._sources[source].slots)
            assert ends.owner.forget_source(source) == (free and not end.alive)
        ends.obey()

    def come_to_rest(self) -> None:
        before = None
        while before != (before := snapshot_of(self.ends)):
            for source in self.living():
                self.ends.sources[source].step()
                self.ends.deliver(source)
            self.ends.begin(1 << 20)
            for import_id in list(self.ends.flights):
                self.ends.land(import_id)
            self.retire()


def snapshot_of(ends: Ends) -> object:
    """What changes as long as a good step is left."""
    queues = [
        (len(source.inbox), len(source.outbox), len(source.program), source.attempt)
        for source in ends.sources.values()
        if source.alive
    ]
    return queues, len(ends.flights), ends.owner.statistics()


@pytest.mark.parametrize("faults", [0, 5, 25])
def test_a_random_walk_ends_every_hand_off_once_and_gives_all_back(faults: int) -> None:
    seen: set[HandoffState] = set()
    outcomes: set[Outcome] = set()
    for seed in range(10):
        walk = Walk(seed, faults)
        walk.run(150)
        walk.finish()
        ends, owner = walk.ends, walk.ends.owner
        assert len(ends.ends) == walk.num_submitted
        assert not owner._requests
        assert not ends.storage
        statistics = owner.statistics()
        assert not statistics["lanes"]["held"]
        assert {n for n, count in statistics["slots"].items() if count} <= {"free", "quarantined"}
        if not faults:
            assert not owner.dropped
        seen |= ends.seen
        outcomes |= set(ends.ends.values())
    assert seen >= set(HandoffState) - {HandoffState.ENDED} - (
        {HandoffState.DRAINING} if not faults else set()
    )
    assert outcomes == (set(Outcome) if faults else {Outcome.PUBLISHED})
