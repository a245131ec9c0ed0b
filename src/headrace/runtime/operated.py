"""What an operator asks of an owner: what it holds and what is out of service, to bring it back."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod

from headrace.errors import DeviceError, Refused
from headrace.ids import AttemptId
from headrace.messages import RequestHeld, SourceHeld
from headrace.protocol.books import Apart
from headrace.protocol.snapshot import Snapshot
from headrace.runtime.active import Active, reason_of
from headrace.runtime.shell import Shell

_log = logging.getLogger("headrace.owner")


class OperatedShell(Shell):
    """The part of an owner that answers an operator."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise Closed if the owner was closed."""

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counts of the machine, the decoder, the restarts and each source.

        Lanes, slots, hand-offs and sources by state, and what is quarantined. Since the start:
        dropped messages by reason, ended requests by cause, retries, restarts, routes that `auto`
        chose, kept prompts; and of all that was published, `imported`: imports, their bytes, and
        those of the bytes that were imported before the prefill ended.
        """
        return {
            **self._machine.statistics(),
            **self._sources.statistics(),
            **self._chooser.statistics(),
            "prefix": self._keeping.index.statistics(),
            "imported": dict(self._imported),
            "decoder": dict(self._decoder.statistics()),
            "requests": {
                "open": len(self._active),
                "decoding": len(self._decoding),
                "imports": len(self._flights),
                "poison_nbytes": self._poison.nbytes,
                "poison_found": self._num_poisoned,
            },
        }

    @property
    def has_source(self) -> bool:
        """Whether a source is in service, or one that died is about to be started again."""
        return not self._machine.no_slot_left

    @property
    def num_slots(self) -> int:
        """Slots of the sources that are not known to be dead."""
        return self._sources.num_slots

    def snapshot(self) -> Snapshot:
        """Everything that is held now, lane by lane and slot by slot."""
        return self._machine.snapshot()

    def sources_held(self) -> list[SourceHeld]:
        """How each source that was ever attached stands."""
        return self._sources.held(self.snapshot().slots)

    def requests_held(self) -> list[RequestHeld]:
        """Every request that holds something or waits for it, the oldest first."""
        actives = sorted(self._active.values(), key=lambda active: active.attempt)
        return [self._request_held(active) for active in actives]

    def _request_held(self, active: Active) -> RequestHeld:
        request = active.request
        return RequestHeld(
            request.label,
            active.attempt,
            self._machine.state_of(request.request).name.lower(),
            request.num_tokens,
            len(request.tokens),
            active.record.nbytes_imported,
            active.carried_nbytes,
            active.record.submitted_ns,
        )

    def quarantined(self) -> dict[AttemptId, Apart]:
        """What is out of service, with reason and time, by the attempt that left it behind."""
        return dict(self._machine.apart)

    def reinstate(self, attempt: AttemptId) -> None:
        """Put what an attempt left behind in service again: you answer for it that it is quiet.

        That no device still writes there can be known from outside only: it was reset, or its
        driver says that its queues are empty.

        Raises:
            Refused: nothing of this attempt is quarantined.
            DeviceError: the decoder does not free it; nothing changes.
        """
        self._check_open()
        if attempt not in self._machine.apart:
            raise Refused(f"nothing of attempt {attempt} is quarantined", field="attempt")
        held = self._apart.get(attempt)
        if held is not None:
            try:
                self._decoder.free(held)
            except Exception as exc:
                raise DeviceError(f"{held} was not freed: {reason_of(exc)}") from exc
            del self._apart[attempt]
        _log.warning("what attempt %s left behind is in service again", attempt)
        self._machine.reinstate(attempt, time.monotonic_ns())
        self._run_commands()

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless lanes, slots, tokens and kept prompts all add up."""
        self._machine.check_integrity()
        self._keeping.index.check_integrity()
