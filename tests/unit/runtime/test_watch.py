"""Actions on descriptors may add and remove descriptors while they are called."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from headrace.runtime.watch import Watch


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.close()


@pytest.fixture
def ready() -> Iterator[list[int]]:
    """Two descriptors that are readable."""
    pairs = [os.pipe() for _ in range(2)]
    for _, writer in pairs:
        os.write(writer, b"x")
    yield [reader for reader, _ in pairs]
    for reader, writer in pairs:
        os.close(reader)
        os.close(writer)


def test_what_is_readable_is_acted_on(watch: Watch, ready: list[int]) -> None:
    acted: list[int] = []
    watch.add(ready[0], lambda: acted.append(ready[0]))
    assert ready[0] in watch
    assert ready[1] not in watch
    watch.take_in(0.0)
    assert acted == [ready[0]]
    poll = select.poll()
    poll.register(watch.fileno(), select.POLLIN)
    assert poll.poll(0)


def test_nothing_to_do(watch: Watch) -> None:
    watch.take_in(0.0)


def test_an_action_may_remove_what_is_next(watch: Watch, ready: list[int]) -> None:
    """Both are readable, and the first to be called ends the other."""
    acted: list[int] = []

    def act(mine: int, other: int) -> None:
        acted.append(mine)
        watch.remove(other)

    watch.add(ready[0], lambda: act(ready[0], ready[1]))
    watch.add(ready[1], lambda: act(ready[1], ready[0]))
    watch.take_in(0.0)
    assert len(acted) == 1


def test_an_action_may_replace_what_is_next(watch: Watch, ready: list[int]) -> None:
    """Its number is another's by now: that one waits for its own readiness."""
    acted: list[str] = []

    def replace(other: int) -> None:
        acted.append("first")
        watch.remove(other)
        watch.add(other, lambda: acted.append("new"))

    watch.add(ready[0], lambda: replace(ready[1]))
    watch.add(ready[1], lambda: replace(ready[0]))
    watch.take_in(0.0)
    assert acted == ["first"]


def test_removing_twice_is_harmless(watch: Watch, ready: list[int]) -> None:
    watch.add(ready[0], lambda: None)
    watch.remove(ready[0])
    watch.remove(ready[0])
    assert ready[0] not in watch
