"""Every reachable state of tiny owners and of a source attempt, and every event in each."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

import pytest

from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, SourceId
from headrace.messages import Released, SourceFinal
from headrace.protocol.commands import Outcome
from headrace.protocol.handoff import Handoff, HandoffState
from headrace.protocol.machine import Machine
from headrace.protocol.slots import Slot, SlotState
from headrace.protocol.source import SourceAttempt, SourceState
from headrace.testing.events import Die, Submit, Tell
from headrace.testing.explorer import Unruly, Walk, recording, walk
from headrace.testing.instances import EPOCH, INSTANCES
from headrace.testing.keys import check_complete
from headrace.testing.mutants import MUTANTS
from headrace.testing.source_walk import SourceWalk, walk_source
from headrace.testing.world import World

Transition = tuple[type, Enum, Enum]

# Transitions of the tables that no sequence of events takes; each needs its reason here.
IMPOSSIBLE: set[Transition] = set()

# Walks without cancels: no request of theirs ends as cancelled.
UNCANCELLED = {name for name, instance in INSTANCES.items() if not instance.cancels}

# Where an import that failed or was given up keeps its read token, who waits for that slot waits
# for its drain deadline.
OVERDUE = {"overdue", "overdrawn", "lanes", "sources", "local-lost"}

_taken: set[Transition] = set()


@cache
def walked(name: str) -> Walk:
    with recording(_taken):
        return walk(INSTANCES[name])


@cache
def walked_source(*, digest: bool, chunk: int) -> SourceWalk:
    with recording(_taken):
        return walk_source(digest=digest, chunk=chunk)


@pytest.mark.parametrize("name", INSTANCES)
def test_every_event_in_every_state_obeys_the_rules(name: str) -> None:
    seen = walked(name)
    print(f"{name}: {seen.num_states} states, {seen.num_edges} events, depth {seen.depth}")
    assert seen.outcomes == set(Outcome) - ({Outcome.CANCELLED} if name in UNCANCELLED else set())
    assert bool(seen.overdue) == (name in OVERDUE)


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_every_call_in_every_state_of_a_source_attempt_obeys_the_rules(
    digest: bool, chunk: int
) -> None:
    seen = walked_source(digest=digest, chunk=chunk)
    print(f"source: {seen.num_states} states, {seen.num_edges} calls, {seen.most_sent} messages")
    assert seen.states == set(SourceState)


def test_every_state_was_visited_and_every_transition_taken() -> None:
    states = {state for name in INSTANCES for state in walked(name).states}
    assert states == {*HandoffState, *SlotState}
    walked_source(digest=True, chunk=1)
    machines: list[type[Machine[Any, Any]]] = [Handoff, Slot, SourceAttempt]
    table = {
        (machine, state, event)
        for machine in machines
        for state, row in machine.TABLE.items()
        for event in row
    }
    taken = {(machine, state, event) for machine, state, event in _taken if machine in machines}
    assert table - taken == IMPOSSIBLE
    assert not taken - table


def test_a_violation_shows_the_shortest_sequence_of_events() -> None:
    mutant = next(m for m in MUTANTS if m.text == "free without the read tokens")
    with mutant.planted(), pytest.raises(Unruly) as caught:
        walk(INSTANCES["one"])
    names = [type(event).__name__ for event in caught.value.path]
    assert names[:3] == ["Submit", "Tell", "Begin"]
    assert len(names) == 4  # and the end that finds the import still reading
    assert "\n  3. begin budget_nbytes 1\n" in str(caught.value)


def test_a_machine_with_an_unknown_attribute_is_refused() -> None:
    world = World(INSTANCES["one"])
    check_complete(world.owner)
    world.owner.another = 0  # type: ignore[attr-defined]
    with pytest.raises(LocalProtocolError, match="another"):
        check_complete(world.owner)


def test_a_dead_source_changes_nothing_any_more() -> None:
    world = World(INSTANCES["empty"])
    source, attempt = SourceId(0), AttemptId(EPOCH, 0, 1)
    world.bring(Submit())
    world.bring(Submit())
    world.bring(Tell(source, Released(attempt, 0, 0), good=False))
    second = AttemptId(EPOCH, 1, 1)
    world.bring(Tell(source, SourceFinal(second, 0, 1, "logits", 0, 0, 0), good=True))
    world.bring(Die(source))
    world.owner.message(source, Released(second, 0, 1), world.now_ns)
    assert not world.owner.commands()
    assert world.owner.dropped == {"dead": 1}
