"""What may be said of a hand-off's transfer: one rule for metrics, page and spans."""

from __future__ import annotations

from headrace.messages import Measured
from headrace.server.events import ChoiceEnded
from headrace.telemetry.report import TIMER_NOISE_NS


def computed_by_owner(event: ChoiceEnded) -> bool:
    """Whether the owner computed all of the prompt that it had not kept."""
    reuse = event.ended.reuse
    return event.ended.local or (reuse is not None and reuse.remainder == "owner")


def moved(event: ChoiceEnded) -> Measured | None:
    """What was measured, if cells went from one process to another; nothing else has a tail."""
    measured = event.ended.measured
    if measured is None or not measured.imports or not measured.kv_nbytes:
        return None
    return None if computed_by_owner(event) else measured


def tail_ns(event: ChoiceEnded) -> int | None:
    """The transfer tail; None where there is none, or the readings contradict each other."""
    measured = moved(event)
    if measured is None or not measured.source_final_ns or measured.tail_ns < 0:
        return None
    return measured.tail_ns


def hidden_share(event: ChoiceEnded) -> float | None:
    """1 - tail / T, of 1; None without a tail, or where T is below timer noise."""
    measured, tail = event.ended.measured, tail_ns(event)
    if measured is None or tail is None or measured.import_ns < TIMER_NOISE_NS:
        return None
    return 1 - tail / measured.import_ns
