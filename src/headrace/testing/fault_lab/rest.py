"""Rule 4 at the end of a schedule: all faults stopped, time ran on, and everything is at rest.

The bound is worked out from the limits: how long one hand-off may hold what the next one waits for,
whoever dies, times the number of hand-offs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.testing.fault_lab.safety import Broken, require
from headrace.testing.fault_lab.setting import MOST_SPANS, S, Setting
from headrace.testing.fault_lab.words import seconds

if TYPE_CHECKING:
    from headrace.testing.fault_lab.schedule import Lab

_LONGEST_STEP_NS: Final = 6 * S  # of an engine: the slowest pace, twice
_MOST_STEPS: Final = 3 * MOST_SPANS  # of an engine: cells told one by one, with its checks
_ODDITIES_NS: Final = 100 * S  # an engine's silence, a late message, a restart, a late fence


def longest_ns(setting: Setting) -> int:
    """A bound on the time from a request to its end."""
    limits = setting.tiny.limits
    prefill_ns = _MOST_STEPS * _LONGEST_STEP_NS
    waits_ns = limits.progress_timeout_ns + 3 * limits.drain_timeout_ns
    each_ns = prefill_ns + waits_ns + _ODDITIES_NS
    num_attempts = sum(asked.attempts + asked.local for asked in setting.asked)
    return setting.horizon_ns + num_attempts * each_ns


def at_rest(lab: Lab) -> None:
    """Check that everything has ended, and that what is set apart is so for a reason.

    Raises:
        Broken, Violation: with what did not.
    """
    require(4, lab.now_ns <= longest_ns(lab.setting), f"at rest only after {seconds(lab.now_ns)}")
    for request in range(len(lab.asked)):
        require(4, request in lab.reports, f"request {request} never ends")
    world = lab.world
    world.check()
    require(4, not world.check_over(), "a hand-off waits for ever for a slot that drains")
    lost = sum(lane.lost for lane in lab.device.lanes)
    apart = world.ledger.lanes_apart
    fits = abs(lost - apart) <= lab.shell.num_phantoms
    require(3, fits, f"{lost} lanes are lost, and {apart} are set apart")
    for lane in lab.device.lanes:
        require(4, lane.lost or lane.holder is None, f"{lane} is still held by {lane.holder}")
    for (source, index), slot in world.ledger.slots.items():
        memory = lab.sources[source].slots[index]
        quiet = not memory.writing and not memory.reading
        if slot.holder is None and not quiet:
            raise Broken(3, f"{memory} is free, and is still written or read")
        lost_read = any(reader not in world.ledger.tickets for reader in slot.readers)
        require(4, slot.holder is None or not quiet or lost_read, f"{memory} is never given back")
