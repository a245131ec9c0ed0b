"""The channel between an owner and one source, as bytes, and what it can do to them.

A message is encoded when it is sent and decoded when it arrives. Without a fault it arrives once,
whole, and in its turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.messages import FromSource, ToSource, encode
from headrace.plan import Plan
from headrace.testing.fault_lab import faults
from headrace.testing.fault_lab.forging import flood, forged, garbled, misplaced
from headrace.testing.fault_lab.setting import MS, S

if TYPE_CHECKING:
    from headrace.testing.fault_lab.schedule import Lab
    from headrace.testing.fault_lab.sources import LabSource

_DELAYS: Final = (30 * MS, 2 * S, 25 * S)


class Link:
    """Both directions of one source's channel."""

    def __init__(self, lab: Lab, source: LabSource) -> None:
        self._lab = lab
        self._source = source
        self._stream = lab.choices.stream(f"l{source.id}")
        self._up_ns = 0  # nothing that is sent now arrives before
        self._down_ns = 0
        self._said: list[bytes] = []  # of the running attempt, oldest first

    @property
    def quiet_ns(self) -> int:
        """When all that is in order will have arrived at the owner."""
        return self._up_ns

    def up(self, message: FromSource) -> None:
        """The source sends."""
        lab, payload = self._lab, encode(message)
        self._said.append(payload)
        fault = "" if self._source.local else lab.fault(self._stream, "transport", faults.UP)
        if fault:
            lab.blame(message, self._source.id)
            self._disturb(fault, message, payload)
            return
        self._up_ns = max(self._up_ns, lab.now_ns + lab.setting.latency_ns)
        self._arrive(self._up_ns, payload)

    def down(self, message: ToSource) -> None:
        """The owner sends."""
        lab, payload = self._lab, encode(message)
        fault = "" if self._source.local else lab.fault(self._stream, "transport", faults.DOWN)
        arrive_ns = max(self._down_ns, lab.now_ns + lab.setting.latency_ns)
        if fault:
            lab.blame(message, self._source.id)
        match fault:
            case "grant-lost":
                return
            case "grant-late":
                arrive_ns += self._stream.pick(_DELAYS)
            case "grant-cut-short":
                payload = payload[: self._stream.below(len(payload))]
            case "cancel-twice" if type(message).__name__ == "Cancel":
                lab.at(arrive_ns, self._source.receive, payload)
        self._down_ns = arrive_ns
        lab.at(arrive_ns, self._source.receive, payload)

    @property
    def _plan(self) -> Plan:
        return self._lab.geometry.plan(self._source.num_tokens)

    def _disturb(self, fault: str, message: FromSource, payload: bytes) -> None:
        stream, now_ns = self._stream, self._lab.now_ns
        due_ns = max(self._up_ns, now_ns + self._lab.setting.latency_ns)
        match fault:
            case "message-lost":
                return
            case "message-late":
                due_ns += stream.pick(_DELAYS)
            case "message-twice":
                self._arrive(due_ns, payload)
            case "message-replayed":
                self._arrive(due_ns + stream.pick(_DELAYS), payload)
            case "message-repeated":  # something that it said long ago, now and after this
                self._arrive(due_ns, stream.pick(self._said[-6:]))
            case "message-flood":
                self._arrive(due_ns, payload)
                for flooding in flood(message, self._plan):
                    self._arrive(due_ns, encode(flooding))
                self._up_ns = due_ns
                return
            case "message-misplaced":
                self._up_ns = due_ns
                self._arrive(due_ns, payload)
                self._arrive(due_ns, encode(misplaced(stream, message, self._plan)))
                return
            case "message-overtaken":
                self._arrive(due_ns + stream.pick(_DELAYS), payload)
                return
            case "message-cut-short":
                payload = payload[: stream.below(len(payload))]
            case "message-garbled":
                payload = garbled(stream, payload)
            case "message-forged":
                payload = forged(stream, message, self._lab.identities())
        self._up_ns = due_ns
        self._arrive(due_ns, payload)

    def after_death(self, at_ns: int) -> None:
        """Something that it said arrives when its death was told."""
        if self._said:
            self._arrive(at_ns, self._stream.pick(self._said[-6:]))

    def _arrive(self, at_ns: int, payload: bytes) -> None:
        self._lab.at(at_ns, self._lab.shell.receive, self._source, payload)
