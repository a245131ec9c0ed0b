"""Published entries: their first token, their decode steps by turns, their end.

A step takes as many entries as the decoder computes together, in the order of their turns; tokens
are then chosen and taken one by one.

Callbacks of callers run here. What one raises or asks for ends its own request only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from headrace.backends.base import Decoder
from headrace.errors import DeviceError
from headrace.ids import AttemptId
from headrace.protocol.commands import Cause
from headrace.protocol.owner import Owner
from headrace.runtime.active import Active, pass_on, reason_of


class Decoding:
    """The entries that decode, in the order of their turns."""

    def __init__(
        self,
        machine: Owner,
        decoder: Decoder,
        actives: Mapping[AttemptId, Active],
        carry_out: Callable[[], None],
    ) -> None:
        """`actives`: all requests, since a step of one stands in the way of others' imports."""
        self._machine = machine
        self._decoder = decoder
        self._actives = actives
        self._carry_out = carry_out
        self._entries: deque[Active] = deque()
        # Decoded and not taken yet: what an interrupt leaves here is taken by the next step.
        self._stepped: deque[tuple[Active, memoryview]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, active: Active, token: int | None, logits: memoryview) -> None:
        """The entry is published: choose its first token, unless the source gave it."""
        request = active.request
        if request.options.hold:
            request.entry, request.logits = active.entry, bytes(logits)
            request.tokens += [] if token is None else [token]
            active.end("finished", "", None)
            return
        last = request.options.max_tokens == 0
        if not last:
            try:
                chosen = active.choose(logits) if token is None else token
            except Exception as exc:  # a row of logits that holds no choice
                self.finish(active, "failed", reason_of(exc), Cause.MALFORMED)
                return
            try:
                last = active.take(chosen)
            except BaseException:  # an interrupt in a callback: nobody would decode it on
                self.finish(active, "cancelled", "its callback was interrupted", Cause.CANCELLED)
                raise
            if self._ended_by_callback(active):
                return
        if request.options.audit:
            try:
                active.audit(self._decoder)
            except BaseException as exc:
                self.finish(active, "failed", reason_of(exc), Cause.DEVICE, quarantine=True)
                pass_on(exc)
                return
        if not self._ended_by_callback(active):
            if last:
                self.finish(active, "finished", "", None)
            else:
                self._entries.append(active)

    def step(self) -> None:
        """One step of the entries whose turn it is; the others' order stays."""
        if not self._stepped:
            self._decode()
        while self._stepped:
            active, logits = self._stepped.popleft()
            if not active.request.done:  # by a callback of one before it
                self._take(active, logits)

    def _decode(self) -> None:
        """Compute the next logits of the first entries, and put them last; or fail them all."""
        group = list(islice(self._entries, self._decoder.caps.decode_batch))
        begun_ns = time.monotonic_ns()
        try:
            rows = self._decoder.decode_step(
                [(active.entry, active.request.tokens[-1]) for active in group]
            )
            if len(rows) != len(group):
                raise DeviceError(f"a step of {len(group)} entries gave {len(rows)} rows of logits")
        except BaseException as exc:
            for active in group:
                if not active.request.done:
                    self.finish(active, "failed", reason_of(exc), Cause.DEVICE, quarantine=True)
            pass_on(exc)
            return
        self._stepped.extend(zip(group, rows, strict=True))
        self._entries.rotate(-len(group))
        ended_ns = time.monotonic_ns()
        for other in self._actives.values():
            other.record.neighbour_decoded(begun_ns, ended_ns)
        for active in group:
            active.record.decoded(begun_ns, ended_ns)

    def _take(self, active: Active, logits: memoryview) -> None:
        """Choose an entry's next token from its row."""
        try:
            token = active.choose(logits)
        except BaseException as exc:  # a row that holds no choice: it alone fails
            self.finish(active, "failed", reason_of(exc), Cause.DEVICE)
            pass_on(exc)
            return
        try:
            active.take(token)
        finally:  # an interrupt in a callback must not hide that the token was the last
            if not self._ended_by_callback(active) and active.complete:
                self.finish(active, "finished", "", None)

    def finish(
        self,
        active: Active,
        outcome: str,
        reason: str,
        cause: Cause | None,
        *,
        quarantine: bool = False,
    ) -> None:
        """The request is over; its storage is given back, or set apart."""
        if active in self._entries:
            self._entries.remove(active)
        active.end(outcome, reason, cause)
        why = reason if quarantine else ""
        self._machine.retire(active.request.request, time.monotonic_ns(), why)
        self._carry_out()

    def _ended_by_callback(self, active: Active) -> bool:
        """Whether a callback cancelled or broke its request, which is then over."""
        if active.callback_error and not active.request.done:
            self.finish(active, "failed", active.callback_error, Cause.CANCELLED)
        return active.request.done
