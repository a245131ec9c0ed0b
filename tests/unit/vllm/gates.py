"""A source whose progress a test decides: the replay engine, which waits at a gate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

GATED = "headrace.testing.sinks:open_gated"


class Gate:
    """A FIFO at `path`; the source takes a byte before each commit, its final and its return."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def open(self) -> None:
        """Whoever waits goes on, and nobody waits any more. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def let(self, steps: int) -> None:
        """Let so many steps pass."""
        if self._fd is not None:
            os.write(self._fd, bytes(steps))


@contextmanager
def gate_at(path: Path) -> Iterator[Gate]:
    gate = Gate(path)
    try:
        yield gate
    finally:
        gate.open()


def open_dying(options: Mapping[str, Any]) -> NoReturn:
    """A factory of a source process that ends before it is ready."""
    os._exit(3)
