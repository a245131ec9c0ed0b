"""What stands between an import that was begun and the report of its load."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace.backends.base import Fence, Reservation, SlotView
from headrace.backends.paged import PagedDecoder
from headrace.plan import Copy
from headrace.vllm import owner_thread
from headrace.vllm.owner_thread import OwnerThread, Reports
from headrace.vllm.scheduling import Orders
from tests.unit.vllm.test_owner_thread import PATIENCE_S, Stand, load, settings_of

pytestmark = pytest.mark.usefixtures("no_source_left", "one_thread")

QUIET_S = 0.2


class Later(PagedDecoder):
    """Its imports are under way until `over` is set; with `blocks` they do not return before."""

    def __init__(self, cache: Any, *, blocks: bool) -> None:
        super().__init__(cache)
        self.begun, self.over = threading.Event(), threading.Event()
        self.close_fails = False
        self._blocks = blocks

    def begin_import(  # type: ignore[override]
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        super().begin_import(reservation, slot, copies)
        self.begun.set()
        if self._blocks:
            assert self.over.wait(PATIENCE_S)
        return self

    def done(self) -> bool:
        return self.over.is_set()

    def close(self) -> None:
        super().close()
        if self.close_fails:
            self.close_fails = False
            raise RuntimeError("it does not close")


class Slow:
    """An owner's thread whose imports take as long as the test wants."""

    def __init__(self, *, blocks: bool = False) -> None:
        settings = settings_of()
        self.stand = Stand(settings)
        self.stand.thread.close()
        self.decoder = Later(self.stand.cache, blocks=blocks)
        self.stand.thread = OwnerThread(self.decoder, settings, settings.sources)
        self.stand.paged = self.decoder


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    made.stand.thread.start()
    yield made
    made.decoder.over.set()
    made.stand.thread.close()


def test_an_abort_is_reported_when_the_import_under_way_is_over(slow: Slow) -> None:
    """Its blocks are vLLM's again from then on, and not before."""
    stand = slow.stand
    stand.thread.carry_out(Orders(loads=(load("a", [1, 2]),)))
    assert slow.decoder.begun.wait(PATIENCE_S)
    stand.thread.carry_out(Orders(aborted=("a",)))
    assert stand.take(QUIET_S) == Reports()
    assert stand.paged.statistics()["lanes_reserved"] == 1
    stand.thread.carry_out(Orders(loads=(load("b", [2, 3]),)))
    stand.until(1)
    assert stand.failed == ["b"]
    slow.decoder.over.set()
    stand.until(2)
    assert stand.failed == ["b", "a"]
    stand.thread.carry_out(Orders(loads=(load("c", [2, 3]),)))
    stand.until(3)
    assert stand.loaded == ["c"]


def test_a_load_is_reported_when_its_last_import_is_over(slow: Slow) -> None:
    slow.stand.thread.carry_out(Orders(loads=(load("a", [1, 2]),)))
    assert slow.decoder.begun.wait(PATIENCE_S)
    assert slow.stand.take(QUIET_S) == Reports()
    slow.decoder.over.set()
    slow.stand.until(1)
    assert slow.stand.loaded == ["a"]


def test_a_thread_that_does_not_end_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and nothing that it may still use is taken from it."""
    made = Slow(blocks=True)
    thread = made.stand.thread
    thread.start()
    thread.carry_out(Orders(loads=(load("a", [1, 2]),)))
    assert made.decoder.begun.wait(PATIENCE_S)
    monkeypatch.setattr(owner_thread, "CLOSE_TIMEOUT_S", 0.01)
    with caplog.at_level(logging.ERROR, "headrace.vllm"):
        thread.close()
    assert "did not end within" in caplog.text
    assert made.stand.take() == Reports(), "it may still write"
    made.decoder.over.set()
    thread._thread.join(PATIENCE_S)
    made.stand.until(1)
    assert made.stand.loaded + made.stand.failed == ["a"]
    os.close(thread._wake)


def test_an_owner_that_does_not_close_well(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    slow.stand.thread.carry_out(Orders(loads=(load("a", [1, 2]),)))
    assert slow.decoder.begun.wait(PATIENCE_S)
    slow.decoder.close_fails = True
    slow.stand.thread.close()
    assert "was not closed well" in caplog.text
    slow.stand.take()
    assert slow.stand.failed == ["a"]
