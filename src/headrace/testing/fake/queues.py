"""Queues that lag the host, and what must have happened before what.

Every piece of work has a place: its stream, and its number there. A stream, an event and the host
each have a *clock*: for each stream, the number up to which its work comes before what follows
here. A wait joins the event's clock to the stream's; an event that the host found done joins the
host's; and work that the host queues comes after all that the host knows. So whether two pieces of
work are ordered is read from numbers when the later one is queued, and not found out by luck.

Carrying work out is another matter: it happens when the host asks (`Event.done` lets a little of it
happen, in an order drawn by chance), or must (`Event.wait`, and what the compute stream needs).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.errors import DeviceError
from headrace.testing.fake.ranges import Ranges, overlap

Clock = dict[int, int]


class HostWaits(DeviceError):
    """The host would wait for a stream that the test holds up: on a device it would hang."""


@dataclass(eq=False)
class Work:
    """A copy or a kernel: what it touches, and how it is carried out."""

    what: str
    run: Callable[[], object]
    reads: Ranges
    writes: Ranges
    poison: Callable[[], None]
    blockers: int = 0  # earlier work that still needs what this one overwrites
    done: bool = False
    then: list[Work] = field(default_factory=list)

    def touches(self, ranges: Ranges) -> bool:
        """Whether it reads or writes any of these bytes."""
        return bool(overlap(self.reads, ranges) or overlap(self.writes, ranges))


@dataclass(eq=False)
class Mark:
    """An event's place in its stream, and when the device came past it."""

    stream: Queue
    clock: Clock
    passed: bool = False
    time_ns: int = 0


@dataclass(eq=False)
class Wait:
    """A stream stands still here until the mark is passed."""

    mark: Mark


class Queue:
    """A stream."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.items: deque[Work | Mark | Wait] = deque()
        self.clock: Clock = {index: 0}
        self.held_up = False

    def __repr__(self) -> str:
        return f"stream {self.name}"

    @property
    def runnable(self) -> bool:
        """Whether its first item can be carried out now."""
        if self.held_up or not self.items:
            return False
        first = self.items[0]
        return not isinstance(first, Wait) or first.mark.passed


class Queues:
    """All streams of a device, and the host beside them."""

    def __init__(self, seed: int, now_ns: Callable[[], int]) -> None:
        self.streams: list[Queue] = []
        self.host: Clock = {}
        self.pending: list[Work] = []
        self._rng = random.Random(seed)
        self._now_ns = now_ns

    def stream(self, name: str) -> Queue:
        """A new stream, which comes after all that the host knows."""
        queue = Queue(len(self.streams), name)
        self.streams.append(queue)
        return queue

    def number(self, queue: Queue) -> tuple[int, Clock]:
        """The place of the next piece of work in a stream, and its clock."""
        join(queue.clock, self.host)
        queue.clock[queue.index] += 1
        return queue.clock[queue.index], queue.clock

    def push(self, queue: Queue, work: Work) -> None:
        """Queue work. Its target is poison from when nothing queued before it needs the target."""
        for earlier in self.pending:
            if earlier.touches(work.writes):
                work.blockers += 1
                earlier.then.append(work)
        if not work.blockers:
            work.poison()
        self.pending.append(work)
        queue.items.append(work)

    def record(self, queue: Queue) -> Mark:
        """Queue an event."""
        join(queue.clock, self.host)
        mark = Mark(queue, dict(queue.clock))
        queue.items.append(mark)
        return mark

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Queue a stream's wait."""
        join(queue.clock, mark.clock)
        queue.items.append(Wait(mark))

    def known(self, mark: Mark) -> None:
        """The host found the mark passed."""
        join(self.host, mark.clock)

    # Carrying out.

    def step(self) -> bool:
        """Carry out one item of a stream that can; False if none can."""
        ready = [queue for queue in self.streams if queue.runnable]
        if ready:
            self._carry_out(self._rng.choice(ready))
        return bool(ready)

    def run_to(self, mark: Mark) -> None:
        """Carry out what must be for the mark to be passed, and no more. Raises: HostWaits."""
        while not mark.passed:
            self._force(mark.stream)

    def flush(self, queue: Queue) -> None:
        """Carry out all of a stream. Raises: HostWaits."""
        while queue.items:
            self._force(queue)

    def drop(self) -> None:
        """Carry nothing out any more."""
        for queue in self.streams:
            queue.items.clear()
        self.pending.clear()

    def _force(self, queue: Queue) -> None:
        if queue.held_up:
            raise HostWaits(f"the host waits for {queue}, which the test holds up")
        first = queue.items[0]
        if isinstance(first, Wait):
            self.run_to(first.mark)
        self._carry_out(queue)

    def _carry_out(self, queue: Queue) -> None:
        item = queue.items.popleft()
        if isinstance(item, Mark):
            item.passed, item.time_ns = True, self._now_ns()
        elif isinstance(item, Work):
            item.done = True
            self.pending.remove(item)
            item.run()
            for later in item.then:
                later.blockers -= 1
                if not later.blockers and not later.done:
                    later.poison()


def join(clock: Clock, other: Clock) -> None:
    """Make a clock come after another one, too."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
