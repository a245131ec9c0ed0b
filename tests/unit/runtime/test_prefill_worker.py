"""`SubprocessPrefillWorker`: a Future that ends exactly once, whoever cancels, closes or dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Closed, LocalProtocolError, PeerDied, Refused
from headrace.ids import Span
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.prefill_worker import PrefillFailed, PrefillResult, SubprocessPrefillWorker
from headrace.runtime.requests import RequestOptions
from headrace.runtime.supervisor import RestartPolicy
from tests.faults.lab import GATED, GEOMETRY, LAYERS, Gate, expected_cells, prompt

pytestmark = pytest.mark.usefixtures("nothing_left")

CONTEXT = 64
WITHIN_S = 20.0
STREAMED = RequestOptions(route="streamed")


class Gated:
    """A worker whose source waits at a gate, and what its progress tells."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.gate = Gate(directory / "gate")
        options = {**GEOMETRY, "gate": str(self.gate.path)} | changes
        self.worker = SubprocessPrefillWorker(GATED, options, context=CONTEXT)
        self.told: list[Span] = []
        self._came = threading.Condition()

    def prefill(self, seed: int) -> Future[PrefillResult]:
        return self.worker.prefill(prompt(seed), STREAMED, on_progress=self._progress)

    def until_told(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.told) >= count, WITHIN_S)

    def _progress(self, span: Span, arrived: int, total: int) -> None:
        assert 0 < arrived <= total
        with self._came:
            self.told.append(span)
            self._came.notify_all()


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    made = Gated(tmp_path)
    with made.worker:
        yield made
        made.gate.open()


def assert_exact(result: PrefillResult, seed: int) -> None:
    cells = {
        (layer, part): result.parts[layer][part] for layer in range(LAYERS) for part in range(2)
    }
    assert cells == expected_cells(prompt(seed))


def test_a_whole_result_by_default(gated: Gated) -> None:
    gated.gate.open()
    result = gated.worker.prefill(prompt(1)).result(WITHIN_S)
    assert_exact(result, 1)
    assert result.num_tokens == 40
    assert result.windows[0] == (24, 40)
    assert result.windows[2] == (0, 40)
    assert len(result.logits) == 4 * 32
    assert result.token is None


def test_progress_tells_each_layer_group_as_it_arrives(gated: Gated) -> None:
    future = gated.prefill(1)
    gated.gate.allow(2)
    gated.until_told(2)
    assert not future.done()
    assert gated.told == [Span(0, 1, 0, 40), Span(1, 2, 0, 40)]
    gated.gate.open()
    assert_exact(future.result(WITHIN_S), 1)
    assert len(gated.told) == LAYERS


@pytest.mark.parametrize("spans", [None, 0, 1, LAYERS])
def test_a_future_can_be_cancelled_at_each_moment(gated: Gated, spans: int | None) -> None:
    """None: while another call runs, so that its own has not begun."""
    first = gated.prefill(1) if spans is None else None
    future = gated.prefill(2)
    if spans:
        gated.gate.allow(spans)
        gated.until_told(spans)
    assert future.cancel()
    assert not wait_for([future], WITHIN_S).not_done  # those who wait for it are told
    with pytest.raises(CancelledError):
        future.result(WITHIN_S)
    after = gated.prefill(3)
    gated.gate.open()
    assert_exact(after.result(WITHIN_S), 3)
    if first is not None:
        assert_exact(first.result(WITHIN_S), 1)


def test_a_future_that_is_done_cannot_be_cancelled(gated: Gated) -> None:
    gated.gate.open()
    future = gated.prefill(1)
    future.result(WITHIN_S)
    assert not future.cancel()
    assert_exact(future.result(), 1)


def test_cancels_from_many_threads(gated: Gated) -> None:
    """Each Future ends once: as a result or as cancelled."""
    gated.gate.open()
    futures = [gated.prefill(seed) for seed in range(40)]
    threads = [threading.Thread(target=future.cancel) for future in futures[::2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wait_for(futures, WITHIN_S).not_done  # cancelled ones are told as well
    for seed, future in enumerate(futures):
        if not future.cancelled():
            assert_exact(future.result(0), seed)
    assert not any(future.cancelled() for future in futures[1::2])


def test_close_while_running(tmp_path: Path) -> None:
    """Those that run and those that wait are told, and no Future is left open."""
    gated = Gated(tmp_path)
    gated.worker.start()
    futures = [gated.prefill(seed) for seed in range(5)]
    gated.gate.allow(1)
    gated.until_told(1)
    gated.worker.close()  # the source stands at its gate and does not answer: it is ended
    gated.worker.close()
    gated.gate.open()
    for future in futures:
        with pytest.raises(Closed, match="the worker was closed"):
            future.result(0)
    with pytest.raises(Closed):
        gated.worker.prefill([1])


def test_close_right_after_a_call(tmp_path: Path) -> None:
    gated = Gated(tmp_path)
    gated.gate.open()
    gated.worker.start()
    futures = [gated.worker.prefill(prompt(seed)) for seed in range(3)]
    gated.worker.close()
    for future in futures:
        assert future.done()


def test_a_worker_that_was_not_started(tmp_path: Path) -> None:
    gated = Gated(tmp_path)
    gated.gate.open()
    with pytest.raises(Closed, match="not started"):
        gated.worker.prefill([1])
    gated.worker.close()


def test_a_worker_that_is_closed_before_its_start(tmp_path: Path) -> None:
    gated = Gated(tmp_path)
    gated.gate.open()
    gated.worker.close()
    gated.worker.close()
    with pytest.raises(Closed, match="the worker was closed"):
        gated.worker.start()
    with pytest.raises(Closed):
        gated.worker.prefill([1])


@pytest.mark.parametrize("where", ["on_progress", "done_callback"])
def test_close_from_its_own_callback(gated: Gated, where: str) -> None:
    """It asks for the end and returns; the thread ends by itself, and no Future is left open."""
    worker = gated.worker
    returned = threading.Event()

    def close(*_: object) -> None:
        worker.close()
        worker.close()
        with pytest.raises(Closed):
            worker.prefill([1])
        returned.set()

    gated.gate.open()
    first = worker.prefill(
        prompt(1), STREAMED, on_progress=close if where == "on_progress" else None
    )
    if where == "done_callback":
        first.add_done_callback(close)
    others = []
    for seed in range(2, 5):
        with suppress(Closed):  # it may have ended by now
            others.append(worker.prefill(prompt(seed)))
    assert returned.wait(WITHIN_S)
    worker._thread.join(WITHIN_S)
    assert not worker._thread.is_alive()
    for future in [first, *others]:
        assert future.done()
        if not isinstance(future.exception(0), Closed):
            future.result(0)
    worker.close()


def test_what_comes_after_the_end(gated: Gated) -> None:
    """A prefill is refused, a cancel does nothing."""
    running = gated.prefill(1)
    gated.worker.close()
    assert not running.cancel()
    with pytest.raises(Closed, match="the worker was closed"):
        running.result(0)
    with pytest.raises(Closed, match="closed or was not started"):
        gated.prefill(2)


def test_calls_cancels_and_the_end_from_many_threads(tmp_path: Path) -> None:
    """Each call is refused or ends, whichever comes first; nothing hangs and no thread fails."""
    gated = Gated(tmp_path)
    gated.gate.open()
    gated.worker.start()
    futures: list[Future[PrefillResult]] = []
    failures: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            for at in range(20):
                future = gated.worker.prefill(prompt(seed + at))
                futures.append(future)
                if at % 3 == 0:
                    future.cancel()
        except Closed:
            pass
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while len(futures) < 10 and any(thread.is_alive() for thread in threads):
        pass
    closers = [threading.Thread(target=gated.worker.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in [*threads, *closers]:
        thread.join(WITHIN_S)
        assert not thread.is_alive()
    assert failures == []
    assert all(future.done() for future in futures)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "text"),
    [
        ([], RequestOptions(), Refused, "prompt is empty"),
        ([1] * 65, RequestOptions(), Refused, "65"),
        ([32], RequestOptions(), Refused, "outside"),
        ([1], RequestOptions(chunk=-1), Refused, "chunk is -1"),
        ([1], RequestOptions(route="sideways"), Refused, "route"),  # type: ignore[arg-type]
        (["one"], RequestOptions(), Refused, "no sequence of token ids"),
        ([1.5], RequestOptions(), Refused, "no sequence of token ids"),
        ([-1], RequestOptions(), Refused, "no sequence of token ids"),
        (7, RequestOptions(), Refused, "no sequence of token ids"),
    ],
)
def test_a_refused_call_fails_its_future_alone(
    gated: Gated, tokens: Any, options: RequestOptions, error: type[Exception], text: str
) -> None:
    gated.gate.open()
    with pytest.raises(error, match=text):
        gated.worker.prefill(tokens, options).result(WITHIN_S)
    assert_exact(gated.prefill(1).result(WITHIN_S), 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_of_the_owners_ends_the_worker(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call fails with it; those that run end with the worker."""

    def wrong(*_: object, **__: object) -> None:
        raise LocalProtocolError("a rule was broken")

    running = gated.prefill(1)
    gated.gate.allow(1)
    gated.until_told(1)
    monkeypatch.setattr(DecoderOwner, "submit", wrong)
    with pytest.raises(LocalProtocolError, match="a rule was broken"):
        gated.prefill(2).result(WITHIN_S)
    with pytest.raises(Closed, match="a rule was broken"):
        running.result(WITHIN_S)
    with pytest.raises(Closed):
        gated.prefill(3)


def test_a_callback_that_raises_ends_its_own_call(gated: Gated) -> None:
    gated.gate.open()

    def fail(span: Span, arrived: int, total: int) -> None:
        raise KeyError(f"{span} is not to my liking")

    neighbour = gated.prefill(2)
    with pytest.raises(KeyError, match="not to my liking"):
        gated.worker.prefill(prompt(1), STREAMED, on_progress=fail).result(WITHIN_S)
    assert_exact(neighbour.result(WITHIN_S), 2)
    assert_exact(gated.prefill(3).result(WITHIN_S), 3)


def test_a_failing_engine(tmp_path: Path) -> None:
    gated = Gated(tmp_path, fail_at_layer=3)
    gated.gate.open()
    with gated.worker:
        with pytest.raises(PrefillFailed, match="RuntimeError: replay was told to fail at layer 3"):
            gated.prefill(1).result(WITHIN_S)
        with pytest.raises(PrefillFailed):
            gated.worker.prefill(prompt(1)).result(WITHIN_S)


def test_a_source_that_dies(gated: Gated) -> None:
    running, waiting = gated.prefill(1), gated.prefill(2)
    gated.gate.allow(1)
    gated.until_told(1)
    os.kill(gated.worker._handle.pid, signal.SIGKILL)
    for future in (running, waiting):
        with pytest.raises(PrefillFailed, match="signal 9"):
            future.result(WITHIN_S)
    with pytest.raises(Refused, match="no prefill source"):
        gated.prefill(3).result(WITHIN_S)


@pytest.mark.parametrize(
    ("engine", "options", "error", "text"),
    [
        ("nowhere", {}, Refused, "unknown source 'nowhere'"),
        ("headrace.nothing:open", {}, Refused, "cannot import it"),
        ("replay", {"lairs": 1}, Refused, "unknown field `lairs`"),
        ("replay", {"dtype": "float3"}, Refused, "unknown dtype 'float3'"),
        ("tests.faults.engines:open_dying", {}, PeerDied, "exit status 9 while starting"),
    ],
)
def test_a_worker_that_cannot_start(
    engine: str, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    """`start` raises, everything is closed again, and `close` is harmless."""
    worker = SubprocessPrefillWorker(engine, options, context=CONTEXT)
    with pytest.raises(error, match=text):
        worker.start()
    with pytest.raises(Closed):
        worker.prefill([1])
    worker.close()


def test_what_a_worker_counts(gated: Gated) -> None:
    first = gated.prefill(1)
    gated.gate.allow(1)
    gated.until_told(1)
    assert gated.worker.statistics()["running"] == 1
    cancelled = gated.prefill(2)
    while gated.worker.statistics()["waiting"]:  # until the thread has taken it up
        pass
    cancelled.cancel()
    gated.gate.open()
    assert_exact(first.result(WITHIN_S), 1)
    wait_for([cancelled], WITHIN_S)
    gated.worker.close()
    counts = gated.worker.statistics()
    assert counts == {
        "prefills": 2,
        "finished": 1,
        "failed": 0,
        "cancelled": 1,
        "running": 0,
        "waiting": 0,
        "serving": 0,
    }


def test_a_source_that_dies_is_started_again(tmp_path: Path) -> None:
    """Where a policy says so; a prefill may then be tried again, as any request."""
    gate = Gate(tmp_path / "gate")
    options = {**GEOMETRY, "gate": str(gate.path)}
    policy = RestartPolicy(first_delay_s=0.01)
    with SubprocessPrefillWorker(GATED, options, context=CONTEXT, restart=policy) as worker:
        retried = worker.prefill(prompt(1), RequestOptions(on_failure="retry"))
        failed = worker.prefill(prompt(2))
        os.kill(worker._handle.pid, signal.SIGKILL)
        gate.open()
        assert_exact(retried.result(WITHIN_S), 1)
        assert_exact(failed.result(WITHIN_S), 2)  # it was waiting, and is served by the next


def test_a_failure_has_a_cause(gated: Gated) -> None:
    future = gated.prefill(1)
    gated.gate.allow(1)
    gated.until_told(1)
    os.kill(gated.worker._handle.pid, signal.SIGKILL)
    with pytest.raises(PrefillFailed, match="signal 9") as caught:
        future.result(WITHIN_S)
    assert caught.value.cause == "source-died"
