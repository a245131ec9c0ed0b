"""Walks every reachable state of a tiny owner and tries every event in each.

The walk is breadth first over the real `headrace.protocol.owner.Owner`. After each event the ledger
and the rules (`headrace.testing.ledger`, `headrace.testing.rules`), which know no transition table,
say whether what the owner did was right; if not, `Unruly` shows the shortest sequence of events
that leads there.

That every run ends is checked on the same graph. A good event is one that a source, a decoder or a
caller brings without a fault, a cancel or a deadline. The graph of the good events that change
something has no cycle, and where it ends, everything has ended: every request decided, every lane
and slot free or set apart. One wait is left to the clock: that for a slot whose read token never
comes back (the import was given up, or the device failed it), up to its drain deadline.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from headrace.ids import AttemptId, RequestId
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.plan import Plan
from headrace.protocol import handoff
from headrace.protocol.commands import Outcome
from headrace.protocol.machine import Machine
from headrace.testing.events import Event, Misuse, Tell, is_good
from headrace.testing.facts import Terms, Violation, rule
from headrace.testing.instances import Instance
from headrace.testing.keys import check_complete
from headrace.testing.world import World


class Unruly(Violation):
    """A machine broke a rule; `path` is the shortest sequence of events that leads to it."""

    def __init__(self, instance: Instance, text: str, path: list[Event]) -> None:
        steps = "".join(f"\n  {at}. {describe(event)}" for at, event in enumerate(path, 1))
        super().__init__(f"instance {instance.name}: {text}\nafter{steps}")
        self.path = path


@dataclass
class Walk:
    """What a walk saw.

    overdue: states that no good event leaves although a hand-off waits: for a slot that is given up
    at its drain deadline.
    """

    instance: Instance
    num_states: int = 0
    num_edges: int = 0
    depth: int = 0
    overdue: int = 0
    states: set[Enum] = field(default_factory=set)
    outcomes: set[Outcome] = field(default_factory=set)


def walk(instance: Instance) -> Walk:
    """Visit every state that an instance can reach, and bring every event in each.

    Raises:
        Unruly: at the first broken rule.
    """
    with _bound_on_progress(instance.max_progress):
        return _Walker(instance).run()


def describe(event: Event) -> str:
    """An event in a few words."""
    match event:
        case Tell(source=source, message=message):
            lease = f"slot {message.slot} generation {message.generation}"
            return f"source {source} tells of {message.attempt} in {lease}: {_told(message)}"
        case Misuse(call=call, subject=subject):
            return f"misuse {call}({subject})"
        case _:
            facts = [
                f"{name} {value}" if not isinstance(value, AttemptId | RequestId) else str(value)
                for name, value in zip(event._fields, event, strict=True)
            ]
            return " ".join([type(event).__name__.lower(), *facts])


@contextmanager
def recording(taken: set[tuple[type, Enum, Enum]]) -> Iterator[None]:
    """Note every transition (machine, state, event) that any machine takes meanwhile."""
    step = Machine._step

    def noting(self: Machine[Any, Any], event: Enum) -> None:
        taken.add((type(self), self.state, event))
        step(self, event)

    Machine._step = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Machine._step = step  # type: ignore[method-assign]


@contextmanager
def _bound_on_progress(count: int) -> Iterator[None]:
    bounds = vars(handoff)
    kept, bounds["MAX_PROGRESS"] = bounds["MAX_PROGRESS"], count
    try:
        yield
    finally:
        bounds["MAX_PROGRESS"] = kept


class _Walker:
    def __init__(self, instance: Instance) -> None:
        self._walk = Walk(instance)
        self._snapshots = _Snapshots()
        self._numbers: dict[Hashable, int] = {}
        self._parents: list[tuple[int, Event | None]] = []
        self._good: list[list[int]] = []
        self._frontier: deque[tuple[int, int, bytes]] = deque()

    def run(self) -> Walk:
        self._enter(World(self._walk.instance), 0, None, 0)
        while self._frontier:
            number, depth, snapshot = self._frontier.popleft()
            self._leave(number, depth, snapshot)
        self._check_acyclic()
        self._walk.num_states = len(self._parents)
        return self._walk

    def _enter(self, world: World, parent: int, event: Event | None, depth: int) -> int:
        """The number of the state that `world` is in; a new state is checked and queued."""
        key = world.key
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._parents)
            self._parents.append((parent, event))
            self._good.append([])
            world.check()
            check_complete(world.owner)
            self._walk.states.update(world.states())
            self._walk.depth = depth
            self._frontier.append((number, depth, self._snapshots.save(world)))
        return number

    def _leave(self, number: int, depth: int, snapshot: bytes) -> None:
        """Bring every event in one state, each to a copy of it; idle ones share one copy."""
        shared = self._snapshots.load(snapshot)
        key = shared.key
        for event in list(shared.events()):
            self._walk.num_edges += 1
            with self._blaming(number, event):
                if shared.is_idle(event):
                    shared.bring_idle(event)
                    rule(shared.key == key, "an event that must change nothing changed something")
                    continue
                world = self._snapshots.load(snapshot)
                self._walk.outcomes |= world.bring(event)
                child = self._enter(world, number, event, depth + 1)
            if is_good(event) and child != number:
                self._good[number].append(child)
        if not self._good[number]:
            with self._blaming(number, None):
                self._walk.overdue += shared.check_over()

    def _check_acyclic(self) -> None:
        """No run of good events comes back: with `check_over`, each of them ends."""
        entering = [0] * len(self._good)
        for children in self._good:
            for child in children:
                entering[child] += 1
        free = [number for number, count in enumerate(entering) if not count]
        for number in free:
            for child in self._good[number]:
                entering[child] -= 1
                if not entering[child]:
                    free.append(child)
        if len(free) < len(self._good):
            number = next(at for at, count in enumerate(entering) if count)
            with self._blaming(number, None):
                rule(False, "good events go round for ever")

    @contextmanager
    def _blaming(self, number: int, event: Event | None) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # whatever a machine raises where it must not is a finding
            path = [] if event is None else [event]
            while number:
                number, step = self._parents[number]
                path += [] if step is None else [step]
            name = "" if isinstance(exc, Violation) else f"{type(exc).__name__}: "
            raise Unruly(self._walk.instance, f"{name}{exc}", path[::-1]) from exc


class _Snapshots:
    """Copies of worlds, in which what never changes is shared."""

    _shared: ClassVar[dict[int, object]] = {}

    def save(self, world: World) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {Instance: self._share, Plan: self._share, Terms: self._share}
        pickler.dump(world)
        return buffer.getvalue()

    def load(self, snapshot: bytes) -> World:
        world = pickle.loads(snapshot)
        assert isinstance(world, World)
        return world

    def _share(self, fact: object) -> tuple[Callable[[int], object], tuple[int]]:
        self._shared[id(fact)] = fact
        return _shared_fact, (id(fact),)


def _shared_fact(number: int) -> object:
    return _Snapshots._shared[number]


def _told(message: Computing | Progress | SourceFinal | Failed | Released) -> str:
    if not isinstance(message, Progress):
        return type(message).__name__.lower()
    digests = f" digests {message.digests}" if message.digests else ""
    return f"progress {'; '.join(map(str, message.spans))}{digests}"
