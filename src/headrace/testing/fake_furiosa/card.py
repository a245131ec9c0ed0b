"""A fake card: memory that the host cannot read, and in-order streams that get on when looked at.

Nothing that is queued runs by itself. Each look at an event lets a stream get on by a step, in an
order that is drawn from a seed; a wait runs what it waits for. So host memory keeps its old bytes
until its copy is due, card memory is no number until it is written, and again when it was given
up. Whatever a real card would leave to chance is a `Fault` here.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

MAX_IN_FLIGHT: Final = 32
"""Operations on one stream, as for the vendor's runtime."""

_UNWRITTEN: Final = 0xFF
"""The byte of memory that nobody wrote: no number as bf16, and -1 as an int."""


class Fault(RuntimeError):
    """The fake card was misused, or was told to fail."""


class FakeCard:
    """One device. `fail_copy`: the copy to the host, from 0, that fails; None for none.

    polls_per_step: how many looks it takes until one more thing runs. counts: what was done.
    peak_in_flight: the most operations that were queued on one stream.
    faults: each misuse, also of those that nobody saw raised.
    """

    def __init__(self, seed: int = 0, polls_per_step: int = 1) -> None:
        self._random = random.Random(seed)
        self._polls_per_step = polls_per_step
        self._num_polls = 0
        self._streams: list[FakeStream] = []
        self._thread: int | None = None
        self._broken: str | None = None
        self.fail_copy: int | None = None
        self.peak_in_flight = 0
        self.faults: list[str] = []
        self.counts = dict.fromkeys(("polls", "kernels", "copies_to_host", "copies_to_card"), 0)
        self.default = FakeStream(self)
        self.current = self.default

    def fault(self, text: str) -> Fault:
        self.faults.append(text)
        return Fault(text)

    def enter(self) -> None:
        """A call of the vendor's: by the one thread, on a card that works."""
        mine = threading.get_ident()
        self._thread = self._thread or mine
        if mine != self._thread:
            raise self.fault("a second thread used the card")
        if self._broken is not None:
            raise Fault(self._broken)

    def adopt(self, stream: FakeStream) -> None:
        self._streams.append(stream)

    def queue(self, work: Callable[[], None], *, stream: FakeStream | None = None) -> None:
        """Queue work on a stream, by default the current one."""
        (stream or self.current).push(work)

    def poll(self) -> None:
        """A look of the host: now and then something runs."""
        self.counts["polls"] += 1
        self._num_polls += 1
        if self._num_polls % self._polls_per_step == 0:
            ready = [stream for stream in self._streams if stream.can_run()]
            if ready:
                self._random.choice(ready).step()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run what is queued, in any order that the streams allow, until `done`."""
        while not done():
            ready = [stream for stream in self._streams if stream.can_run()]
            if not ready:
                raise self.fault("what is waited for can never be done")
            self._random.choice(ready).step()

    def quiet(self) -> bool:
        """Whether nothing is queued."""
        return not any(stream.length for stream in self._streams)

    def break_down(self, text: str) -> None:
        """From now on each call fails, and what is queued never runs."""
        self._broken = text


class FakeStream:
    """An in-order queue of work and of waits for events."""

    def __init__(self, card: FakeCard) -> None:
        self._card = card
        self._queue: deque[Callable[[], None] | FakeMark] = deque()
        self._num_own = 0
        self.stream_id = 0
        card.adopt(self)

    @property
    def length(self) -> int:
        return len(self._queue)

    def push(self, work: Callable[[], None] | FakeMark) -> None:
        self._queue.append(work)
        in_flight = len(self._queue) - self._num_own
        self._card.peak_in_flight = max(self._card.peak_in_flight, in_flight)
        if in_flight > MAX_IN_FLIGHT:
            raise self._card.fault(f"more than {MAX_IN_FLIGHT} operations on one stream")

    def after(self, work: Callable[[], None]) -> None:
        """As `push`, of what is no operation of the host's."""

        def own() -> None:
            self._num_own -= 1
            work()

        self._num_own += 1
        self._queue.append(own)

    def can_run(self) -> bool:
        if not self._queue:
            return False
        head = self._queue[0]
        return head.passed if isinstance(head, FakeMark) else True

    def step(self) -> None:
        head = self._queue.popleft()
        if isinstance(head, FakeMark):
            return
        try:
            head()
        except Exception as exc:
            self._card.break_down(f"queued work failed: {exc}")
            raise

    def synchronize(self) -> None:
        self._card.enter()
        self._card.run_until(lambda: not self._queue)

    def __enter__(self) -> FakeStream:
        self._card.enter()
        self._outer, self._card.current = self._card.current, self
        return self

    def __exit__(self, *_: object) -> None:
        self._card.current = self._outer


class FakeMark:
    """A point in a stream; `passed` once all before it ran."""

    def __init__(self) -> None:
        self.passed = False

    def set(self) -> None:
        self.passed = True


class FakeEvent:
    """As the vendor's: complete if it was never recorded."""

    def __init__(self, card: FakeCard) -> None:
        self._card = card
        self._mark: FakeMark | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self._card.enter()
        self._mark = FakeMark()
        self._card.queue(self._mark.set, stream=stream)

    def query(self) -> bool:
        self._card.enter()
        self._card.poll()
        return self._mark is None or self._mark.passed

    def synchronize(self) -> None:
        self._card.enter()
        mark = self._mark
        if mark is not None:
            self._card.run_until(lambda: mark.passed)

    def wait(self, stream: FakeStream | None = None) -> None:
        self._card.enter()
        if self._mark is not None:
            (stream or self._card.current).push(self._mark)


class FakeTensor:
    """Memory of a card. The host can copy from it and to it, and look at its shape."""

    def __init__(
        self, card: FakeCard, memory: torch.Tensor, axes: Any, base: FakeTensor | None = None
    ) -> None:
        self.card, self.memory, self.inter_chip_axes = card, memory, axes
        self._base = base  # a view keeps what it looks at
        if base is None:
            weakref.finalize(self, _given_up, card, card.current, memory).atexit = False

    @classmethod
    def empty(
        cls, card: FakeCard, sizes: Sequence[int], dtype: torch.dtype, axes: Any
    ) -> FakeTensor:
        memory = torch.empty(tuple(sizes), dtype=dtype)
        _unwrite(memory)
        return cls(card, memory, axes)

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def narrow(self, dim: int, start: int, length: int) -> FakeTensor:
        view = self.memory.narrow(dim, start, length)
        return FakeTensor(self.card, view, self.inter_chip_axes, self._base or self)

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> FakeTensor:
        """From the host; read when the copy runs, so the source must be there and unchanged."""
        card = self.card
        card.enter()
        _same_form(card, src, self.memory)
        source, memory, before = weakref.ref(src), self.memory, src.clone()

        def copy() -> None:
            host = source()
            if host is None:
                raise card.fault("host memory was let go before its copy to the card")
            if not torch.equal(host.view(torch.uint8), before.view(torch.uint8)):
                raise card.fault("host memory was changed before its copy to the card")
            memory.copy_(host)
            card.counts["copies_to_card"] += 1

        self._queue(copy, wait=not non_blocking)
        return self

    def copy_to(self, target: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        """To the host; the target keeps its bytes until the copy runs."""
        card = self.card
        card.enter()
        _same_form(card, target, self.memory)
        there, memory = weakref.ref(target), self.memory

        def copy() -> None:
            host = there()
            if host is None:
                raise card.fault("host memory was let go before its copy from the card")
            if card.counts["copies_to_host"] == card.fail_copy:
                raise Fault("a copy to the host failed, as it was told to")
            host.copy_(memory)
            card.counts["copies_to_host"] += 1

        self._queue(copy, wait=not non_blocking)
        return target

    def _queue(self, work: Callable[[], None], *, wait: bool) -> None:
        stream = self.card.current
        self.card.queue(work)
        if wait:
            stream.synchronize()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Of what torch can do with a host tensor and one of a card, only a copy exists."""
        given = next(each for each in args if isinstance(each, FakeTensor))
        if func is not torch.Tensor.copy_ or args[1] is not given:
            raise given.card.fault(f"the host reads memory of a card in {func}")
        options = {"non_blocking": False, **(kwargs or {})}
        target: torch.Tensor = given.copy_to(args[0], **options)
        return target


def _same_form(card: FakeCard, host: torch.Tensor, memory: torch.Tensor) -> None:
    if host.shape != memory.shape or host.dtype != memory.dtype:
        raise card.fault(
            f"a copy between {tuple(host.shape)} {host.dtype} and {tuple(memory.shape)} "
            f"{memory.dtype}"
        )


def _given_up(card: FakeCard, stream: FakeStream, memory: torch.Tensor) -> None:
    """The allocator may use it for what is queued on its stream from now on."""
    if stream.length:
        stream.after(lambda: _unwrite(memory))
    else:
        _unwrite(memory)


def _unwrite(memory: torch.Tensor) -> None:
    memory.view(torch.uint8).fill_(_UNWRITTEN)
