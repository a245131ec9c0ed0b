"""A source that stands still at any point of a prompt, and what is done to it there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.engine.checkpoint import fingerprint
from headrace.testing.faulty import FACTORY, REST, STEP, Event, Order, order_path
from tests.vllm.checkpoints import LAYERS, POSITIONS, VOCAB
from tests.vllm.engines import Asked, Engine
from tests.vllm.finite import FACTORY as FINITE

POINTS: Final = ("begin", *(f"commit {at}" for at in range(1, LAYERS + 1)), "final", "return")
"""Where a source of a streamed prompt stands still, in their order."""

_numbers = itertools.count()


def replay_of(model: Path, control: Path, **options: Any) -> dict[str, Any]:
    """A source that takes orders and has the geometry of tiny-llama, with bytes of its own."""
    geometry = {
        "layers": LAYERS,
        "heads": 2,
        "head_dim": 32,
        "dtype": "float32",
        "vocab_size": VOCAB,
        "max_positions": POSITIONS,
        "model": fingerprint(model),
    }
    asked = {"engine": FINITE, "control": str(control), "options": geometry | options}
    return {"source": FACTORY, "options": asked, "name": "replay", "num_slots": 4}


def torch_of(model: Path, control: Path, python: str) -> dict[str, Any]:
    """A source that takes orders and computes tiny-llama."""
    options = {"model": str(model), "dtype": "float32", "threads": 1}
    asked = {"engine": "torch", "control": str(control), "options": options}
    return {"source": FACTORY, "options": asked, "python": python, "name": "torch", "num_slots": 4}


class Station:
    """The order of one prompt: its source waits at each point for leave to go on."""

    def __init__(self, control: Path, tokens: Sequence[int], order: dict[str, Any]) -> None:
        number = next(_numbers)
        paths = [control / f"{name}-{number}" for name in ("events", "steps")]
        for path in paths:
            os.mkfifo(path)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        self._events, self._steps = (os.open(path, flags) for path in paths)
        self._paths = [*paths, order_path(str(control), tokens)]
        self._told: list[Event] = []
        asked = Order(str(paths[0]), str(paths[1]), **order)
        self._paths[2].write_bytes(msgspec.json.encode(asked))

    def allow(self, steps: int) -> None:
        """Let the source go on past so many points."""
        os.write(self._steps, STEP * steps)

    def open(self) -> None:
        """Let it go on without a stop."""
        os.write(self._steps, REST)

    def told(self) -> list[Event]:
        """The points that it came to."""
        while True:
            try:
                raw = os.read(self._events, 1 << 16)
            except BlockingIOError:
                return self._told
            self._told += [msgspec.json.decode(line, type=Event) for line in raw.splitlines()]

    def close(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
        os.close(self._events)
        os.close(self._steps)


@contextmanager
def station(control: Path, asked_for: Sequence[int], **order: Any) -> Iterator[Station]:
    """An order for a prompt that vLLM is asked for, which is loaded up to its last full block."""
    end = Asked("", list(asked_for)).end
    made = Station(control, asked_for[:end], order)
    try:
        yield made
    finally:
        made.close()


def stand_at(engine: Engine, here: Station, point: str) -> None:
    """Have the source of a prompt that was asked for come to a point, and stand there."""
    number = POINTS.index(point)
    here.allow(number)
    engine.until(lambda: len(here.told()) > number, f"the source at `{point}`")
