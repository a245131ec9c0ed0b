"""How the owner's cost grows with layer groups, slots and requests.

groups: CPU of the owner process for one real hand-off, cut into ever more layer groups and chunks;
the same bytes move each time. slots: the same for one hand-off at a source with ever more slots.
waiting: the owner's machine alone, for all of ever more requests that were submitted at once to one
source and one lane. in_flight: the same with a source and a lane for each, all of them streaming by
turns. The machine is asked for its next deadline after each message, as an owner's turn does.

Costs grow linearly or better where the slope between neighbours, both axes logarithmic, is at most
1. Timer noise is allowed for by STEEPEST.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.bench.faults.table import Figure
from headrace.bench.rows import RowFile, spread
from headrace.bench.stand import Stand
from headrace.geometry import agree
from headrace.ids import SourceId, Span
from headrace.messages import Progress, Released, SourceFinal
from headrace.plan import Plan, compile_plan
from headrace.protocol.books import Limits
from headrace.protocol.commands import Publish, StartImport, StartPrefill
from headrace.protocol.owner import Owner
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle

KEY = ("axis", "number", "repeat")
AXES = ("groups", "slots", "waiting", "in_flight")
COST_OF = {
    "groups": "one hand-off",
    "slots": "one hand-off",
    "waiting": "all hand-offs",
    "in_flight": "all hand-offs",
}
STEEPEST = 1.15  # of a slope that counts as linear

LAYERS, NUM_TOKENS = 64, 64
GEOMETRY = {"layers": LAYERS, "heads": 1, "head_dim": 64, "dtype": "float16"}
MACHINE_LAYERS = 8  # and so spans of a hand-off where the machine is alone
WARM_UP = 3


class Numbers(NamedTuple):
    """Up to how many of each, by powers of two, and how often each is measured."""

    groups: int = 1024
    slots: int = 64
    requests: int = 256
    repeats: int = 10

    def of(self, axis: str) -> list[int]:
        """The numbers of an axis."""
        last = {"groups": self.groups, "slots": self.slots}.get(axis, self.requests)
        return [1 << power for power in range(last.bit_length())]


def run(numbers: Numbers, file: RowFile, say: Callable[[str], None]) -> None:
    """Measure what `file` does not hold yet; rows hold the CPU ns of the owner's thread."""
    for axis in AXES:
        points: list[dict[str, Any]] = [
            {"axis": axis, "number": number, "repeat": repeat}
            for repeat in range(numbers.repeats)
            for number in numbers.of(axis)[:: 1 if repeat % 2 == 0 else -1]
        ]
        left = [point for point in points if point not in file]
        if not left:
            continue
        say(f"{axis}: {len(left)} of {len(points)} are to be measured")
        with ExitStack() as stack:
            take = _taker(axis, sorted({point["number"] for point in left}), stack)
            for point in left:
                load = os.getloadavg()[0]
                file.append({**point, **take(point["number"]), "load_1min": load})


def handoff_cut(number: int) -> RequestOptions:
    """A request whose prompt is told in `number` spans: by layer groups, then in chunks too."""
    chunks = max(1, number // LAYERS)
    return RequestOptions(
        route="streamed",
        group_layers=max(1, LAYERS // number),
        chunk=0 if chunks == 1 else max(1, NUM_TOKENS // chunks),
        max_tokens=0,
    )


def machine_ns(num_requests: int, *, num_sources: int, num_slots: int, num_lanes: int) -> int:
    """CPU ns of an owner's machine that serves all requests, submitted at once."""
    owner = Owner(1, Limits(num_lanes=num_lanes, context=NUM_TOKENS))
    for number in range(num_sources):
        owner.add_source(SourceId(number), num_slots, _plan_for, 0)
    begun_ns = time.thread_time_ns()
    for _ in range(num_requests):
        owner.submit(NUM_TOKENS, 0)
    running: deque[tuple[StartPrefill, int]] = deque()
    left = num_requests
    while left:
        for command in owner.commands():
            match command:
                case StartPrefill():
                    running.append((command, 0))
                case StartImport():
                    owner.import_done(command.import_id, 0)
                case Publish():
                    owner.published(command.attempt, 0)
                    owner.retire(command.attempt.request, 0)
                    left -= 1
        if running:
            grant, layer = running.popleft()
            _tell(owner, grant, layer)
            if layer <= MACHINE_LAYERS:
                running.append((grant, layer + 1))
        if owner.has_pieces:
            owner.begin_imports(1 << 30, 0)
        owner.next_deadline_ns()
    return time.thread_time_ns() - begun_ns


def _tell(owner: Owner, grant: StartPrefill, layer: int) -> None:
    """What a source says next: its layers one by one, its final, that it returned."""
    lease = grant.attempt, grant.slot, grant.generation
    if layer < MACHINE_LAYERS:
        spans = (Span(layer, layer + 1, 0, NUM_TOKENS),)
        owner.message(grant.source, Progress(*lease, spans, (), 1, 1, 2), 0)
    elif layer == MACHINE_LAYERS:
        owner.message(grant.source, SourceFinal(*lease, "logits", 0, 1, 2), 0)
    else:
        owner.message(grant.source, Released(*lease), 0)


@lru_cache
def _plan_for(num_tokens: int, start: int = 0) -> Plan:
    source = ReplayEngine(ReplayOptions(layers=MACHINE_LAYERS, heads=1, head_dim=64)).manifest()
    decoder = decoder_like(source)
    return compile_plan(decoder, agree(source, decoder), num_tokens, NUM_TOKENS)


# What is measured at one number of an axis.


def _taker(axis: str, numbers: Sequence[int], stack: ExitStack) -> Callable[[int], dict[str, Any]]:
    match axis:
        case "groups":
            stand = stack.enter_context(_stand(1))
            for _ in range(WARM_UP):
                _served(stand, handoff_cut(1))
            return lambda number: _served(stand, handoff_cut(number))
        case "slots":
            stands = {number: stack.enter_context(_stand(number)) for number in numbers}
            for _ in range(WARM_UP):
                for each in stands.values():
                    _served(each, handoff_cut(LAYERS))
            return lambda number: _served(stands[number], handoff_cut(LAYERS))
        case "waiting":
            one = partial(machine_ns, num_sources=1, num_slots=2, num_lanes=1)
            return lambda number: {"owner_ns": one(number)}
    return lambda number: {
        "owner_ns": machine_ns(number, num_sources=number, num_slots=1, num_lanes=number)
    }


def _stand(num_slots: int) -> Stand:
    handle = SourceHandle("replay", GEOMETRY, num_slots=num_slots)
    handle.start()
    decoder = NullDecoder(decoder_like(handle.manifest), context=NUM_TOKENS, lanes=1)
    return Stand(handle, decoder, context=NUM_TOKENS)


def _served(stand: Stand, options: RequestOptions) -> dict[str, Any]:
    begun_ns = time.thread_time_ns()
    request = stand.serve([1] * NUM_TOKENS, options)
    owner_ns = time.thread_time_ns() - begun_ns
    measured = request.measured
    spans, messages = (0, 0) if measured is None else (measured.spans, measured.groups)
    return {"owner_ns": owner_ns, "spans": spans, "messages": messages}


# What the rows say.


class Slope(NamedTuple):
    """How the cost grows from one number to the next: as a power of it."""

    before: int
    after: int
    power: float


def medians(rows: Sequence[Mapping[str, Any]], axis: str) -> dict[int, float]:
    """The median cost in ns at each number of an axis, in their order."""
    by_number: dict[int, list[float]] = {}
    for row in rows:
        if row["axis"] == axis:
            by_number.setdefault(row["number"], []).append(row["owner_ns"])
    return {number: spread(by_number[number]).median for number in sorted(by_number)}


def slopes(costs: Mapping[int, float]) -> list[Slope]:
    """The slope between each two neighbours, both axes logarithmic."""
    points = sorted(costs.items())
    return [
        Slope(n, m, math.log(after / before) / math.log(m / n))
        for (n, before), (m, after) in pairwise(points)
    ]


def bend(found: Sequence[Slope]) -> Slope | None:
    """The first slope that is above linear; None if there is none."""
    return next((slope for slope in found if slope.power > STEEPEST), None)


def figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Each axis against the goal: linear or better, or where it bends above that."""
    for axis in AXES:
        costs = medians(rows, axis)
        found = slopes(costs)
        if not found:
            continue
        first, last = min(costs), max(costs)
        bent = bend(found)
        where = "" if bent is None else f"; bends above linear from {bent.before} to {bent.after}"
        steepest = max(found, key=lambda slope: slope.power)
        yield Figure(
            f"{axis.replace('_', ' ')}, owner's CPU for {COST_OF[axis]}",
            f"n^1 at most ({STEEPEST:g} with noise)",
            f"{costs[first] / 1e3:.0f} us at {first}, {costs[last] / 1e3:.0f} us at {last}; "
            f"steepest n^{steepest.power:.2f} from {steepest.before} to {steepest.after}{where}",
            bent is None,
        )
