"""`SubprocessPrefillWorker`: prefill in another process, with a Future for the whole result.

For a caller that has no decoder of headrace's. Asked for no more than `prefill(tokens)` it behaves
as a legacy worker does: one Future, all layers at once. With another route and `on_progress` the
same call tells each layer group as it arrives. Both go through an owner with a memory-only decoder,
so leases, coverage and cancellation are the same as everywhere.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from headrace.backends.null import NullDecoder, decoder_like
from headrace.errors import Closed, HeadraceError, LocalProtocolError
from headrace.geometry import Layout, Manifest
from headrace.ids import Span
from headrace.runtime.active import reason_of
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.worker import SourceHandle

ProgressCallback = Callable[[Span, int, int], None]


class PrefillFailed(HeadraceError):
    """The prefill ended as failed; the text is its reason, and `cause` a word for it."""

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A whole prefill of `num_tokens` positions, in memory of its own.

    parts: per layer, per part, the bytes of the live window [lo, n) of positions, as
    [heads, n - lo, head_dim] (layout `head_major`) or [n - lo, heads, head_dim] (`token_major`).
    windows: per layer its (lo, n). logits: the last position's row, or empty with `token`.
    """

    num_tokens: int
    layout: Layout
    windows: tuple[tuple[int, int], ...]
    parts: tuple[tuple[bytes, ...], ...]
    logits: bytes
    token: int | None


@dataclass(slots=True)
class _Call:
    tokens: Sequence[int]
    options: RequestOptions
    on_progress: ProgressCallback | None
    future: Future[PrefillResult]
    failure: Exception | None = None

    def progress(self, span: Span, arrived: int, total: int) -> None:
        """Tell the caller; what it raises there is its own call's end and nobody else's."""
        if self.on_progress is None or self.failure is not None:
            return
        try:
            self.on_progress(span, arrived, total)
        except Exception as exc:
            self.failure = exc


class SubprocessPrefillWorker:
    """One source process behind a Future.

    The source is spawned and driven by a thread of the worker's own, which lives until `close`.
    """

    def __init__(
        self,
        engine: str,
        options: Mapping[str, Any] | None = None,
        *,
        context: int,
        interpreter: str | None = None,
        num_slots: int = 2,
        start_timeout_s: float = 300.0,
        log_level: str = "WARNING",
        env: Mapping[str, str] | None = None,
        restart: RestartPolicy | None = None,
    ) -> None:
        """`engine`: torch, cuda, rngd, vllm, replay or module:factory.

        `context`: the longest prompt. `restart`: how the source is started again when it dies; by
        default not at all.
        """
        self._handle = SourceHandle(
            engine,
            options,
            interpreter=interpreter,
            num_slots=num_slots,
            start_timeout_s=start_timeout_s,
            log_level=log_level,
            env=env,
        )
        self._context = context
        self._restart = restart
        self._counts = dict.fromkeys(("prefills", "finished", "failed", "cancelled"), 0)
        self._calls: SimpleQueue[_Call | Future[PrefillResult] | None] = SimpleQueue()
        self._running: dict[Future[PrefillResult], tuple[Request, _Call]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ready: Future[Manifest] = Future()
        self._thread = threading.Thread(target=self._serve, name="headrace-worker", daemon=True)
        self._closed = False
        self._serving = False
        self._lock = threading.Lock()  # between callers and the thread: its queue and its end

    def start(self) -> Manifest:
        """Spawn the source and wait until it can serve; returns its manifest.

        Raises:
            Refused: the engine, its options or the machine do not allow it. PeerDied: it died.
            Closed: the worker was closed.
        """
        with self._lock:
            if self._closed:
                raise Closed("the worker was closed")
            self._serving = True
            self._thread.start()
        try:
            return self._ready.result()
        except BaseException:
            if self._ready.done():  # not so when the wait was interrupted: then it still loads
                self.close()
            raise

    def prefill(
        self,
        tokens: Sequence[int],
        options: RequestOptions | None = None,
        *,
        on_progress: ProgressCallback | None = None,
    ) -> Future[PrefillResult]:
        """Start a prefill; the Future can be cancelled until it is done.

        By default the whole route is taken. `on_progress(span, arrived, total)` is called from the
        worker's thread with the cells that arrived last and bytes of KV so far.
        """
        asked = options or RequestOptions()
        held = replace(asked, hold=True, max_tokens=0)
        future: Future[PrefillResult] = Future()
        if not self._put(_Call(tokens, held, on_progress, future)):
            raise Closed("the worker is closed or was not started")
        future.add_done_callback(self._cancelled)
        return future

    def statistics(self) -> dict[str, int]:
        """Counts since the start, those that run, and what waits for the thread.

        prefills: asked for; each is finished, failed or cancelled in the end. From any thread.
        """
        return {
            **self._counts,
            "running": len(self._running),
            "waiting": self._calls.qsize(),
            "serving": int(self._serving),
        }

    def close(self) -> None:
        """End what runs, then the source and the thread. Idempotent.

        From a callback it asks for the end and returns; the thread then ends by itself.
        """
        with self._lock:
            asked, self._closed = self._closed, True
            if self._serving:
                self._calls.put(None)
                os.eventfd_write(self._wake, 1)
        if not asked and not self._ready.done():
            with suppress(Closed):  # not even spawned: then the thread sees `_closed`
                self._handle.kill()  # still loading: it hears nothing before it is done
        if self._thread.ident is None and not asked:
            os.close(self._wake)  # never started: no thread will do it
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _put(self, call: _Call | Future[PrefillResult]) -> bool:
        """Hand a call to the thread; False if it takes none any more."""
        with self._lock:
            if self._closed or not self._serving:
                return False
            self._calls.put(call)
            self._counts["prefills"] += isinstance(call, _Call)
            os.eventfd_write(self._wake, 1)
            return True

    def _cancelled(self, future: Future[PrefillResult]) -> None:
        if future.cancelled():
            self._put(future)  # False: the thread's end has failed or will fail it

    # The worker's thread.

    def _serve(self) -> None:
        owner = None
        reason = "the worker was closed"
        try:
            self._handle.start()
            if self._closed:
                raise Closed("the worker was closed")
            manifest = self._handle.manifest
            lanes = self._handle.num_slots
            decoder = NullDecoder(decoder_like(manifest), context=self._context, lanes=lanes)
            owner = DecoderOwner(decoder, context=self._context)
            owner.attach(self._handle, restart=self._restart)
            owner.watch(self._wake, self._woken)
            self._ready.set_result(manifest)
            while self._take_calls(owner):
                owner.turn(60.0)
                self._settle(owner)
        except BaseException as exc:
            if not self._ready.done():
                self._ready.set_exception(exc)
                return
            reason = f"the worker ended: {reason_of(exc)}"
            raise
        finally:
            with self._lock:
                self._serving = False
            self._fail_all(reason)
            if owner is None:
                self._handle.close()
            else:
                owner.close()
            os.close(self._wake)

    def _fail_all(self, reason: str) -> None:
        """No Future is left open, whether its call was taken or still queued."""
        waiting = list(self._running)
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if isinstance(call, _Call):
                waiting.append(call.future)
        for future in waiting:
            self._fail(future, Closed(reason))

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _take_calls(self, owner: DecoderOwner) -> bool:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return True
            if call is None:
                return False
            if isinstance(call, Future):
                if call in self._running:
                    owner.cancel(self._running.pop(call)[0])
                    self._counts["cancelled"] += 1
                    call.set_running_or_notify_cancel()  # else `futures.wait` never sees its end
                continue
            try:
                request = owner.submit(call.tokens, call.options, on_progress=call.progress)
            except LocalProtocolError as exc:  # the owner itself is at fault
                self._fail(call.future, exc)
                raise
            except Exception as exc:  # tokens that are no numbers, too: the thread must live on
                self._fail(call.future, exc)
            else:
                self._running[call.future] = (request, call)

    def _settle(self, owner: DecoderOwner) -> None:
        for future, (request, call) in list(self._running.items()):
            if call.failure is not None:
                owner.cancel(request)
            if not request.done:
                continue
            del self._running[future]
            if request.entry is None:
                cause = PrefillFailed(request.reason, request.cause)
                self._fail(future, call.failure or cause)
                continue
            result = _copy_out(owner, request)
            owner.release(request)
            if call.failure is not None:
                self._fail(future, call.failure)
            elif future.set_running_or_notify_cancel():
                self._counts["finished"] += 1
                future.set_result(result)
            else:
                self._counts["cancelled"] += 1

    def _fail(self, future: Future[PrefillResult], exc: Exception) -> None:
        """Fail a Future unless its caller has cancelled it."""
        if future.set_running_or_notify_cancel():
            self._counts["failed"] += 1
            future.set_exception(exc)
        else:
            self._counts["cancelled"] += 1


def _copy_out(owner: DecoderOwner, request: Request) -> PrefillResult:
    plan = owner.plan_of(request)
    parts = tuple(
        tuple(owner.read(request, layer.index, part) for part in range(len(layer.parts)))
        for layer in plan.layers
    )
    token = request.tokens[0] if request.tokens else None
    return PrefillResult(plan.num_tokens, plan.layout, plan.windows, parts, request.logits, token)
