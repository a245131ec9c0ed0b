"""The worker half: what it is told to load is reported once, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.null import decoder_like
from headrace.backends.paged import PagedDecoder
from headrace.backends.replay import open as open_replay
from headrace.errors import DeviceError, HeadraceError, PeerDied, Refused
from headrace.runtime.requests import Request
from headrace.vllm.owner_thread import OwnerThread, Reports
from headrace.vllm.scheduling import Load, Orders, Told
from headrace.vllm.settings import Settings, read_settings
from tests.conftest import children
from tests.unit.backends.plain_cache import PlainCache
from tests.unit.vllm.gates import GATED, Gate, gate_at

pytestmark = pytest.mark.usefixtures("no_source_left", "one_thread")

GEOMETRY: dict[str, Any] = {
    "layers": 2,
    "heads": 2,
    "head_dim": 4,
    "dtype": "float32",
    "vocab_size": 32,
    "max_positions": 40,
}
TOKENS = tuple(range(1, 9))
PATIENCE_S = 30.0


class Stand:
    """An owner's thread over a plain cache, with all that it reported."""

    def __init__(self, settings: Settings) -> None:
        self.cache = PlainCache(decoder_like(open_replay(GEOMETRY).manifest()))
        self.paged = PagedDecoder(self.cache)
        self.told: list[tuple[str, str]] = []
        made = self.paged, settings, settings.sources
        self.thread = OwnerThread(*made, told_ended=self._tell)
        self.loaded: list[str] = []
        self.failed: list[str] = []
        self.ended: list[Request] = []

    def _tell(self, load: Load, request: Request) -> None:
        self.told.append((load.request_id, request.outcome))

    def take(self, wait_s: float = 0.0) -> Reports:
        reports = self.thread.take_reports(wait_s)
        self.loaded += sorted(reports.loaded)
        self.failed += sorted(reports.failed)
        self.ended += reports.ended
        return reports

    def until(self, count: int) -> None:
        """Take reports until there were so many."""
        until_s = time.monotonic() + PATIENCE_S
        while len(self.loaded) + len(self.failed) < count:
            assert time.monotonic() < until_s, (self.loaded, self.failed)
            self.take(1.0)


def settings_of(*gates: Gate, options: dict[str, Any] | None = None, **more: Any) -> Settings:
    geometry = GEOMETRY if options is None else {**GEOMETRY, **options}
    sources: list[dict[str, Any]] = [
        {"source": GATED, "options": {**geometry, "gate": str(gate.path)}} for gate in gates
    ] or [{"source": "replay", "options": geometry}]
    given = {"sources": sources, "route": "streamed", "restart": False} | more
    return read_settings(given)


@contextmanager
def started(settings: Settings) -> Iterator[Stand]:
    stand = Stand(settings)
    try:
        stand.thread.start()
        yield stand
    finally:
        stand.thread.close()


def load(name: str, blocks: Sequence[int], **more: Any) -> Load:
    given: dict[str, Any] = {"tokens": TOKENS, "start": 0, "route": "streamed"} | more
    return Load(name, block_ids=(tuple(blocks),), **given)


def check_written(stand: Stand, *blocks: int, places: Sequence[int] = range(4)) -> None:
    """All layers have rows in these blocks, and in no others."""
    for at in stand.cache.cells:
        assert stand.cache.written(*at) == {(block, place) for block in blocks for place in places}


def test_loads_are_reported_once_and_their_blocks_filled() -> None:
    with started(settings_of()) as stand:
        orders = Orders(loads=(load("a", [3, 5]), load("b", [2, 9]), load("c", [1, 4])))
        stand.thread.carry_out(orders)
        stand.until(3)
        assert sorted(stand.loaded) == ["a", "b", "c"]
        assert [request.outcome for request in stand.ended] == ["finished"] * 3
        assert sorted(stand.told) == [(name, "finished") for name in "abc"]
        check_written(stand, 1, 2, 3, 4, 5, 9)
        assert stand.thread.outstanding == 0
        assert stand.take() == Reports()
        stand.thread.carry_out(Orders(aborted=("a", "nobody")))
        stand.thread.carry_out(Orders(loads=(load("d", [3, 5]),)))
        stand.until(4)
        assert stand.loaded[-1] == "d"
        assert not stand.failed


def test_each_failure_has_a_cause() -> None:
    with started(settings_of()) as stand:
        stand.thread.carry_out(
            Orders(loads=(load("too-few-blocks", [3]),), dropped=("left-early",))
        )
        causes = Counter[str]()
        while sum(causes.values()) < 2:
            causes += stand.take(PATIENCE_S).causes
        assert causes == {"refused": 1, "cancelled": 1}
        stand.thread.close()
        stand.thread.carry_out(Orders(loads=(load("late", [3, 4]),)))
        assert stand.take().causes == {"owner-ended": 1}


def test_what_cannot_be_kept_of_a_load_hinders_no_load(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(*given: Any) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(Stand, "_tell", tell)
    with started(settings_of()) as stand:
        stand.thread.carry_out(Orders(loads=(load("a", [3, 5]), load("b", [1, 2]))))
        stand.until(2)
        assert sorted(stand.loaded) == ["a", "b"]
    assert "the disk is full" in caplog.text


def test_what_it_tells_of_its_sources() -> None:
    for options, more, told in (
        ({}, {}, Told(40, True, num_slots=2)),
        ({"prefix": "none"}, {"context": 24}, Told(24, False, num_slots=2)),
    ):
        stand = Stand(settings_of(options=options, **more))
        try:
            assert stand.thread.told is None
            assert stand.thread.start() == told
            assert stand.thread.told == told
        finally:
            stand.thread.close()
        assert stand.thread.told == Told(0, starts_anywhere=False, in_service=False)


def test_a_load_that_goes_on_from_a_prefix() -> None:
    with started(settings_of()) as stand:
        stand.thread.carry_out(Orders(loads=(load("a", [3, 5], start=4),)))
        stand.until(1)
        assert stand.loaded == ["a"]
        check_written(stand, 5)


def test_a_load_that_can_never_be_served_is_failed() -> None:
    """Too long a prompt, blocks that are missing, that another holds, or that are none."""
    with started(settings_of(context=12)) as stand:
        loads = (
            load("long", [1, 2, 3, 4], tokens=tuple(range(16))),
            load("few", [3]),
            load("nothing", [0, 3]),
            load("one", [8, 8]),
        )
        stand.thread.carry_out(Orders(loads=loads))
        stand.until(4)
        assert sorted(stand.failed) == ["few", "long", "nothing", "one"]
        assert not stand.ended
        check_written(stand)
        stand.thread.carry_out(Orders(loads=(load("good", [1, 2]),)))
        stand.until(5)
        assert stand.loaded == ["good"]


def test_an_abort_is_reported_when_nothing_writes_any_more(tmp_path: Path) -> None:
    with gate_at(tmp_path / "gate") as gate, started(settings_of(gate)) as stand:
        thread = stand.thread
        thread.carry_out(Orders(loads=(load("a", [1, 2]), load("b", [3, 4]))))
        thread.carry_out(Orders(loads=(load("taken", [2, 5]),)))
        stand.until(1)
        assert stand.failed == ["taken"], "block 2 is a's"
        thread.carry_out(Orders(aborted=("a",)))
        thread.carry_out(Orders(aborted=("a",)))
        gate.open()
        stand.until(3)
        assert stand.failed == ["taken", "a"]
        assert stand.loaded == ["b"]
        check_written(stand, 3, 4)
        assert sorted(request.cause for request in stand.ended) == ["", "cancelled"]
        thread.carry_out(Orders(loads=(load("c", [1, 2]),)))
        stand.until(4)
        assert stand.loaded == ["b", "c"]


def test_a_dropped_load_is_reported_at_once() -> None:
    with started(settings_of()) as stand:
        stand.thread.carry_out(Orders(dropped=("a",)))
        assert stand.take().failed == {"a"}
        assert stand.thread.outstanding == 0
        check_written(stand)


def test_reports_are_waited_for_only_while_something_is_outstanding(tmp_path: Path) -> None:
    with gate_at(tmp_path / "gate") as gate, started(settings_of(gate)) as stand:
        begun_s = time.monotonic()
        assert stand.take(PATIENCE_S) == Reports()
        assert time.monotonic() - begun_s < PATIENCE_S / 2
        stand.thread.carry_out(Orders(loads=(load("a", [1, 2]),), dropped=("b",)))
        assert stand.take(PATIENCE_S).failed == {"b"}, "there is one already"
        assert time.monotonic() - begun_s < PATIENCE_S / 2
        assert stand.take(0.02) == Reports()
        assert time.monotonic() - begun_s >= 0.02
        gate.open()
        assert stand.take(PATIENCE_S).loaded == {"a"}


def test_a_source_that_dies(tmp_path: Path) -> None:
    before = children()
    with gate_at(tmp_path / "gate") as gate, started(settings_of(gate)) as stand:
        stand.thread.carry_out(Orders(loads=(load("a", [1, 2]), load("b", [3, 4]))))
        gate.let(1)
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        stand.until(2)
        assert sorted(stand.failed) == ["a", "b"]
        assert not any(stand.paged.statistics().values())
        stand.thread.carry_out(Orders(loads=(load("c", [1, 2]),)))
        stand.until(3)
        assert stand.failed[-1] == "c"


def test_a_source_that_dies_is_started_again() -> None:
    before = children()
    with started(settings_of(restart=True, on_failure="retry")) as stand:
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        stand.thread.carry_out(Orders(loads=(load("a", [1, 2]),)))
        stand.until(1)
        assert stand.loaded == ["a"]


def test_a_write_that_raises_fails_the_load_and_gives_its_blocks_back() -> None:
    """An import is over when it returns, so that nothing of it is apart for longer."""
    with started(settings_of()) as stand:
        stand.cache.fails[1] = DeviceError("the op failed")
        stand.thread.carry_out(Orders(loads=(load("a", [1, 2]),)))
        stand.until(1)
        assert stand.failed == ["a"]
        assert "the op failed" in stand.ended[0].reason
        assert not any(stand.paged.statistics().values())
        stand.thread.carry_out(Orders(loads=(load("b", [1, 2]),)))
        stand.until(2)
        assert stand.loaded == ["b"]


def test_writes_that_raise_for_a_while_fail_that_load_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks are not given back before they could be cleared."""
    tried = threading.Semaphore(0)

    def write(*given: Any) -> None:
        tried.release()
        raise DeviceError("the op failed")

    with started(settings_of()) as stand:
        with monkeypatch.context() as patched:
            patched.setattr(stand.cache, "write", write)
            stand.thread.carry_out(Orders(loads=(load("a", [1, 2]),)))
            for _ in range(4):  # the import, and several tries to clear what it left
                assert tried.acquire(timeout=PATIENCE_S)
            assert stand.take() == Reports()
        stand.until(1)
        assert stand.failed == ["a"]
        stand.thread.carry_out(Orders(loads=(load("b", [1, 2]),)))
        stand.until(2)
        assert stand.loaded == ["b"]


def test_the_threads_own_end_fails_all_that_is_outstanding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever ends it: nobody writes then, and vLLM prefills by itself."""
    with gate_at(tmp_path / "gate") as gate, started(settings_of(gate)) as stand:

        def break_down(request_id: str) -> bool:
            raise RuntimeError("a bug of ours")

        stand.thread.carry_out(Orders(loads=(load("a", [1, 2]), load("b", [3, 4]))))
        stand.paged.holds = break_down  # type: ignore[assignment, method-assign]
        gate.open()
        stand.until(2)
        assert sorted(stand.failed) == ["a", "b"]
        assert "prompts are vLLM's from here on" in caplog.text
        stand.thread.carry_out(Orders(loads=(load("c", [5, 6]),), aborted=("a",)))
        assert stand.take(PATIENCE_S).failed == {"c"}
        assert stand.take() == Reports()


def test_close_while_loads_are_running(tmp_path: Path) -> None:
    with gate_at(tmp_path / "gate") as gate, started(settings_of(gate)) as stand:
        stand.thread.carry_out(Orders(loads=(load("a", [1, 2]), load("b", [3, 4]))))
        gate.open()
        stand.thread.close()
        stand.thread.close()
        stand.take()
        assert sorted(stand.failed + stand.loaded) == ["a", "b"]
        stand.thread.carry_out(Orders(loads=(load("c", [1, 2]),), dropped=("d",)))
        assert stand.take().failed == {"c", "d"}
        assert stand.thread.outstanding == 0


# Starting.


def start_of(stand: Stand) -> tuple[bool, BaseException | None]:
    """What start raised, and whether it told it by itself once the thread had ended."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            stand.thread.start()
        except BaseException as exc:
            raised.append(exc)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    inner, until_s = stand.thread._thread, time.monotonic() + PATIENCE_S
    while caller.is_alive() and (inner.ident is None or inner.is_alive()):
        assert time.monotonic() < until_s
        caller.join(0.05)
    caller.join(1.0)
    told = not caller.is_alive()
    with stand.thread._changed:
        stand.thread._changed.notify_all()
    caller.join(PATIENCE_S)
    assert not caller.is_alive()
    stand.thread.close()
    return told, raised[0] if raised else None


def why_not_started(settings: Settings) -> HeadraceError:
    told, raised = start_of(Stand(settings))
    assert told, "start waits, though the thread has ended"
    assert isinstance(raised, HeadraceError), raised
    return raised


def test_a_source_that_does_not_fit_is_refused_at_start() -> None:
    for options, says in (
        ({"model": "another"}, "model: source has another"),
        ({"heads": 3}, "heads: source has 3, decoder has 2"),
        ({"layers": 0}, "layers go from 1"),
    ):
        raised = why_not_started(settings_of(options=options))
        assert isinstance(raised, Refused)
        assert says in str(raised)


def test_a_source_that_dies_at_start_is_told() -> None:
    dies = read_settings({"sources": [{"source": "tests.unit.vllm.gates:open_dying"}]})
    raised = why_not_started(dies)
    assert isinstance(raised, PeerDied)
    assert "exit status 3 while starting" in str(raised)
