"""The commanding end of an order: what a source is told to do, and how far it has come."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.testing.faulty import REST, STEP, Event, Order, Point, order_path

_READ_NBYTES = 1 << 16
_PIPE_NBYTES = 1 << 20


class Gate:
    """One order to one source for one prompt, from when it is given until `close`.

    `events` are the points that the source has come to; a gated one waits at each until `allow`.
    """

    def __init__(
        self, control: Path, tokens: Sequence[int], *, gated: bool = True, **order: Any
    ) -> None:
        """`order`: fields of `Order`."""
        self.events: list[Event] = []
        self._path = order_path(str(control), tokens)
        self._pipes = [self._path.with_suffix(".events")]
        if gated:
            self._pipes.append(self._path.with_suffix(".steps"))
        # Both ends of each are held here: no opening waits, and none sees the end of the other.
        self._fds = [self._open(pipe) for pipe in self._pipes]
        self._rest = b""
        steps = str(self._pipes[1]) if gated else ""
        written = msgspec.json.encode(Order(events=str(self._pipes[0]), steps=steps, **order))
        unready = self._path.with_suffix(".unready")
        unready.write_bytes(written)
        unready.rename(self._path)

    def fileno(self) -> int:
        """Readable when the source has come to a point that is not in `events` yet."""
        return self._fds[0]

    def take_in(self) -> None:
        """Add what the source told to `events`."""
        try:
            while True:
                self._rest += os.read(self._fds[0], _READ_NBYTES)
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        self.events += [msgspec.json.decode(line, type=Event) for line in lines]

    def wait(self, num_events: int, within_s: float) -> bool:
        """Wait for the source without turning its owner; whether it has come that far."""
        poll = select.poll()
        poll.register(self._fds[0], select.POLLIN)
        deadline_s = time.monotonic() + within_s
        self.take_in()
        while len(self.events) < num_events and (left_s := deadline_s - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self.take_in()
        return len(self.events) >= num_events

    def count(self, point: Point) -> int:
        """How often the source came to a point, as far as it is known."""
        return sum(event.point == point for event in self.events)

    def allow(self, steps: int = 1) -> None:
        """Let the source go past `steps` more points."""
        os.write(self._fds[1], STEP * steps)

    def open(self) -> None:
        """Let it go on to its end; harmless if it was not gated, or has."""
        if len(self._fds) > 1:
            os.write(self._fds[1], REST)

    def close(self) -> None:
        """Take the order back; a source that waits goes on."""
        self.open()
        for path in (self._path, *self._pipes):
            path.unlink(missing_ok=True)
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _open(self, pipe: Path) -> int:
        os.mkfifo(pipe)
        fd = os.open(pipe, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # over the user's limit: 64 KiB hold hundreds of events
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
        return fd
