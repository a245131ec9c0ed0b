"""What a schedule is run with: the pools, the times, the requests and how often what fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from headrace.geometry import Emission, Layer
from headrace.ids import AttemptId
from headrace.messages import Prefill, Route
from headrace.plan import Plan
from headrace.protocol.books import Limits
from headrace.protocol.source import expected_spans
from headrace.testing.fault_lab.choices import Stream
from headrace.testing.fault_lab.faults import WAYS, Group
from headrace.testing.fault_lab.geometries import CONTEXT, GEOMETRIES, Geometry
from headrace.testing.instances import EPOCH, Instance

MS: Final = 10**6
S: Final = 10**9

MAX_PROGRESS: Final = 10  # the bounds on messages, made small enough to be reached
MAX_SPANS: Final = 3
MOST_SPANS: Final = MAX_PROGRESS * 3 // 4 * MAX_SPANS

MAX_REQUESTS: Final = 8
_SHARES: Final = (0.0, 0.02, 0.05, 0.12)  # of the occasions at which something fails


@dataclass(frozen=True)
class Tiny(Instance):
    """The owner of one schedule; `num_tokens`, `digest` and `deadline` are the next request's."""

    geometry: Geometry = GEOMETRIES[0]

    @cached_property
    def limits(self) -> Limits:
        times = self.progress_timeout, self.drain_timeout
        return Limits(self.lanes, CONTEXT, self.depth, self.chunk_nbytes, *times)

    def plan_for(self, num_tokens: int, start: int = 0) -> Plan:
        return self.geometry.plan(num_tokens)

    @property
    def _layers(self) -> tuple[Layer, ...]:
        return self.geometry.layers


@dataclass(frozen=True)
class Asked:
    """One request: when it comes, how it is cut, and what its caller does meanwhile.

    cancel_at: the caller wants no more after so many of its events, None = it stays. outrun: that
    cancel comes before the owner's commands for the last of them are carried out. cancel_after_ns:
    it cancels at a time, whatever happens.
    """

    after_ns: int
    num_tokens: int
    route: Route
    group_layers: int
    chunk: int
    prefill_chunk: int
    emission: Emission
    digest: bool
    poison: bool
    attempts: int
    local: bool
    deadline_ns: int | None
    decode_ns: int
    cancel_at: int | None
    outrun: bool
    cancel_after_ns: int | None

    def grant(self, attempt: AttemptId, slot: int, generation: int) -> Prefill:
        """The message that grants a source its slot."""
        cut = self.group_layers, self.chunk, self.prefill_chunk, self.emission, self.digest
        return Prefill(attempt, slot, generation, self.num_tokens, self.route, *cut)


@dataclass(frozen=True)
class Peril:
    """How often one group of things fails: in a `share` of all occasions, `only` in these ways."""

    share: float
    only: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """What one schedule is run with.

    slots: of each source at the start. latency_ns: of a message. lateness_ns: of the owner's timer.
    restarts: how many sources that died are started again. local: whether the owner has an engine
    of its own. horizon_ns: when all faults stop.
    """

    tiny: Tiny
    slots: tuple[int, ...]
    asked: tuple[Asked, ...]
    perils: dict[Group, Peril]
    budget_nbytes: int
    latency_ns: int
    lateness_ns: int
    restarts: int
    local: bool
    horizon_ns: int


def draw_setting(stream: Stream, caller: list[Stream], *, one_lane: bool = False) -> Setting:
    """A setting from `stream`, and each request from its `caller`.

    `one_lane`: what is drawn has one lane, two slots a source and two requests at least. Some may
    be parked where the drawn prefetch depth is above 0.
    """
    one, several = (_is_one, _are_several) if one_lane else (None, None)
    geometry = stream.pick(GEOMETRIES)
    lanes = stream.pick((1, 1, 2, 3), one)
    slots = tuple(stream.pick((1, 2, 2, 3), several) for _ in range(stream.pick((1, 1, 2, 3))))
    depth = stream.pick((0, 1, 1, 2))
    tiny = Tiny(
        "lab",
        (),
        lanes=lanes,
        depth=depth,
        chunk_nbytes=stream.pick((1 << 20, 100, 12, 2)),
        progress_timeout=stream.pick((30 * S, 20 * S)),
        drain_timeout=stream.pick((18 * S, 40 * S, 8 * S, 1 * S)),
        max_progress=MAX_PROGRESS,
        device_faults=True,
        geometry=geometry,
    )
    perils = {group: _draw_peril(stream, ways) for group, ways in WAYS.items()}
    local = stream.pick((False, False, True))
    num_requests = stream.pick(range(1, MAX_REQUESTS + 1), several)
    return Setting(
        tiny=tiny,
        slots=slots,
        asked=tuple(draw_request(caller[at], geometry, local) for at in range(num_requests)),
        perils=perils,
        budget_nbytes=stream.pick((1 << 20, 1, 60)),
        latency_ns=stream.pick((0, 1 * MS, 40 * MS)),
        lateness_ns=stream.pick((0, 1 * MS, 150 * MS)),
        restarts=stream.below(4),
        local=local,
        horizon_ns=stream.pick((60 * S, 20 * S, 200 * S)),
    )


def _is_one(count: int) -> bool:
    return count == 1


def _are_several(count: int) -> bool:
    return count > 1


def _draw_peril(stream: Stream, ways: tuple[tuple[str, ...], ...]) -> Peril:
    """Every kind of fault, or often one alone and more of it: some need others not to come."""
    share = stream.pick(_SHARES)
    if not share or not stream.below(2):
        return Peril(share, tuple(kind for way in ways for kind in way))
    way = stream.pick(ways)
    return Peril((3 if len(way) == 1 else 7) * share, way)


def draw_request(stream: Stream, geometry: Geometry, local: bool) -> Asked:
    """One request, cut into no more spans than its messages can carry."""
    routes: tuple[Route, ...] = ("whole", "chunked", "streamed")
    emissions: tuple[Emission, ...] = ("layers", "cache_groups")
    cancel = stream.pick((*(None,) * 4, "at", "outrun", "after"))
    asked = Asked(
        after_ns=stream.pick((0, 3 * MS, 400 * MS, 3 * S)),
        num_tokens=1 + stream.below(CONTEXT),
        route=stream.pick(routes),
        group_layers=stream.pick((1, 2, 4)),
        chunk=stream.pick((0, 3, 1)),
        prefill_chunk=stream.pick((0, 4, 2)),
        emission=stream.pick(emissions),
        digest=bool(stream.below(2)),
        poison=stream.below(3) == 2,
        attempts=stream.pick((1, 2, 3)),
        local=bool(stream.below(2)) and local,
        deadline_ns=stream.pick((*(None,) * 12, 40 * S, 4 * S, 60 * MS)),
        decode_ns=stream.pick((0, 20 * MS, 2 * S, 20 * S)),
        cancel_at=stream.below(24) if cancel in ("at", "outrun") else None,
        outrun=cancel == "outrun",
        cancel_after_ns=stream.pick((1 * MS, 900 * MS, 25 * S)) if cancel == "after" else None,
    )
    plan = geometry.plan(asked.num_tokens)
    if expected_spans(asked.grant(AttemptId(EPOCH, 0, 1), 0, 0), plan) > MOST_SPANS:
        return replace(asked, chunk=0)
    return asked
