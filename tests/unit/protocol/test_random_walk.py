"""A random walk of an owner and its sources: queues that lag, and every fault at every moment."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headrace.errors import Refused
from headrace.geometry import Full, Shared, Sliding
from headrace.ids import AttemptId, SourceId
from headrace.messages import Prefill, Route
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.books import Limits
from headrace.protocol.commands import Cause, Outcome
from headrace.protocol.handoff import HandoffState
from headrace.protocol.owner import Owner
from headrace.protocol.slots import SlotState
from tests.unit.protocol.builders import CONTEXT, EPOCH, make_plan
from tests.unit.protocol.ends import Ends

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

    owner_type = Owner
    most_lanes = 3

    def __init__(self, seed: int, faults: int) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        limits = Limits(
            num_lanes=self.random.randint(1, self.most_lanes),
            context=CONTEXT,
            prefetch_depth=self.random.randint(0, 2),
            chunk_nbytes=self.random.choice([1, 100, 1 << 20]),
            progress_timeout_ns=400,
            drain_timeout_ns=30,
        )
        self.ends = Ends(
            self.owner_type(EPOCH, limits), lambda n, _: make_plan(n, *KINDS), options_of
        )
        self.policies: list[FailurePolicy] = []
        self.num_reinstated = 0
        if self.random.random() < 0.5:
            self.ends.add_source(1, local=True)
        for _ in range(self.random.randint(1, 2)):
            self.ends.add_source(self.random.randint(1, 3))

    def living(self) -> list[SourceId]:
        """The sources to go on with; where the last has died, a new one comes."""
        ends = self.ends
        living = [id for id, source in ends.sources.items() if source.alive]
        if set(living) <= {ends.local}:
            num_slots = self.random.randint(1, 3)
            living.append(ends.add_source(num_slots, expected=ends.expected > 0))
        return living

    def submit(self) -> None:
        options = options_of(AttemptId(EPOCH, len(self.policies), 1))
        policy = FailurePolicy(self.random.randint(1, 3), local=self.random.random() < 0.3)
        owner, now_ns = self.ends.owner, self.ends.now_ns
        deadline_ns = now_ns + 300 if self.random.random() < 0.2 and self.faults else None
        local = policy.local and not owner.no_local_left
        if owner.no_lane_left or (owner.no_slot_left and not local):
            with pytest.raises(Refused):
                owner.submit(options.num_tokens, now_ns, policy=policy)
            return
        owner.submit(options.num_tokens, now_ns, deadline_ns, digest=options.digest, policy=policy)
        self.policies.append(policy)
        self.ends.obey()

    def retire(self) -> None:
        entries = [
            r for r in self.ends.published if self.ends.owner.state_of(r) is HandoffState.PUBLISHED
        ]
        if entries:
            self.ends.owner.retire(self.random.choice(entries), self.ends.now_ns)
            self.ends.obey()

    def reinstate(self) -> None:
        """An operator answers for everything that is set apart."""
        for attempt in list(self.ends.owner.apart):
            self.num_reinstated += 1
            self.ends.reinstate(attempt)

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
        elif len(self.policies) < 8:
            self.submit()

    def go_wrong(self) -> None:
        ends, source = self.ends, self.random.choice(self.living())
        what = self.random.randrange(18)
        if what < 1:
            requests = list(ends.owner._requests)
            if requests:
                ends.owner.cancel(self.random.choice(requests), ends.now_ns)
                ends.obey()
        elif what == 1:
            ends.garble(source)
        elif what < 7:
            ends.sources[source].step(broken=True)
        elif what == 7:
            ends.now_ns += self.random.choice([10, 50, 500])
            ends.owner.tick(ends.now_ns)
            ends.obey()
        elif what == 8 and ends.flights and self.random.random() < 0.5:
            ends.break_import(self.random.choice(list(ends.flights)))
        elif what < 11 and source != ends.local and self.random.random() < 0.5:
            self.kill(source)
        elif what == 11:
            ends.refuses = self.random.random() < 0.3
        elif what == 12:
            ends.loses = True
        elif what == 13:
            ends.spoils = True
        elif what == 14:
            ends.poisons = True
        elif what == 15:
            self.reinstate()
        elif what == 16 and ends.expected:
            ends.source_not_coming()
        elif what == 17 and ends.expected:
            ends.add_source(self.random.randint(1, 3), expected=True)

    def kill(self, source: SourceId) -> None:
        """A source dies; another is there, or is expected, or none is."""
        what = self.random.randrange(3)
        if what == 0:
            self.ends.add_source(self.random.randint(1, 3))
        elif what == 1:
            self.ends.expect_source()
        self.ends.kill(source)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.random.randrange(100) < self.faults:
                self.go_wrong()
            else:
                self.go_on()

    def finish(self) -> None:
        """No more faults, and time enough for everything to come to its end."""
        ends = self.ends
        ends.refuses = ends.loses = ends.spoils = ends.poisons = False
        while ends.expected:
            ends.source_not_coming()
        self.come_to_rest()
        ends.now_ns += 10**6  # a slot that misses a read token is given up
        ends.owner.tick(ends.now_ns)
        ends.obey()
        self.come_to_rest()
        self.reinstate()
        for source, end in ends.sources.items():
            assert all(s.state is SlotState.FREE for s in ends.owner._sources[source].slots)
            assert ends.owner.forget_source(source) is not end.alive
        ends.obey()

    def come_to_rest(self) -> None:
        before = None
        while before != (before := holdings_of(self.ends)):
            for source in self.living():
                self.ends.sources[source].step()
                self.ends.deliver(source)
            self.ends.begin(1 << 20)
            for import_id in list(self.ends.flights):
                self.ends.land(import_id)
            self.retire()

    def check_grants(self) -> None:
        """No attempt is one too many, and only what may be local was."""
        for grant in self.ends.granted:
            policy, local = self.policies[grant.attempt.counter], grant.source == self.ends.local
            assert policy.local or not local
            assert local or grant.attempt.attempt <= policy.num_attempts
        for attempt in self.ends.retried:
            policy = self.policies[attempt.counter]
            assert policy.local or attempt.attempt < policy.num_attempts


def holdings_of(ends: Ends) -> object:
    """What changes as long as a good step is left."""
    queues = [
        (len(source.inbox), len(source.outbox), len(source.program), source.attempt)
        for source in ends.sources.values()
        if source.alive
    ]
    return queues, len(ends.flights), ends.owner.statistics()


@pytest.mark.parametrize(("faults", "times"), [(0, 8), (5, 15), (25, 50)])
def test_a_random_walk_ends_every_hand_off_once_and_gives_all_back(faults: int, times: int) -> None:
    seen: set[HandoffState] = set()
    outcomes: set[Outcome] = set()
    causes: Counter[Cause] = Counter()
    done: Counter[str] = Counter()
    for seed in range(times):
        walk = Walk(seed, faults)
        walk.run(150)
        walk.finish()
        walk.check_grants()
        ends, owner = walk.ends, walk.ends.owner
        assert len(ends.ends) == len(walk.policies)
        assert not owner._requests
        assert not ends.storage
        statistics = owner.statistics()
        assert statistics["lanes"] == {"free": owner.limits.num_lanes, "quarantined": 0, "held": 0}
        assert sum(statistics["ended"].values()) == len(ends.ends)
        assert statistics["retries"] == {"count": len(ends.retried)}
        if not faults:
            assert not owner.dropped
        seen |= ends.seen
        outcomes |= set(ends.ends.values())
        causes += ends.causes
        done += Counter(
            retried=len(ends.retried),
            local=sum(grant.source == ends.local for grant in ends.granted),
            reinstated=walk.num_reinstated,
        )
    assert seen >= set(HandoffState) - {HandoffState.ENDED} - (
        {HandoffState.DRAINING} if not faults else set()
    )
    assert outcomes == (set(Outcome) if faults else {Outcome.PUBLISHED})
    assert set(done) == ({"retried", "local", "reinstated"} if faults else set())
    if faults == 25:
        assert set(causes) == set(Cause)
