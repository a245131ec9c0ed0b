"""An attempt at each of its stages, between two neighbours, and all that an owner holds of them.

A scene is frozen once for each stage and thawed for each test, so that thousands can be had.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any

import msgspec

from headrace.channel import MAX_MESSAGE_NBYTES, Channel, socket_pair
from headrace.errors import RemoteProtocolError
from headrace.geometry import Manifest
from headrace.ids import AttemptId, RequestId, SourceId, Span
from headrace.messages import FromSource, Released, SourceFinal, decode_from_source, encode
from headrace.plan import Plan
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.commands import (
    CheckDigest,
    Outcome,
    Publish,
    Report,
    StartImport,
    StartPrefill,
)
from headrace.protocol.handoff import Handoff, HandoffState
from headrace.protocol.owner import Owner
from headrace.protocol.slots import SlotState
from headrace.runtime.sources import _fault_of
from headrace.testing.malformed import Case, cases
from headrace.testing.malformed_speech import AttemptMessage, Identity
from tests.unit.protocol.builders import (
    HYBRID,
    Shell,
    cells_of,
    grant,
    make_plan,
    source_manifest,
)

N = 40
PLAN = make_plan(N, *HYBRID)
WHOLE = PLAN.whole()
HALF, REST = Span(0, 2, 0, N), Span(2, len(HYBRID), 0, N)
MANIFEST = source_manifest(*HYBRID)
BUDGET = 1 << 40
SEVERAL_CHUNKS = 1000
DIGEST = 0

Hear = Callable[["Scene", bytes], None]


@dataclass
class Scene:
    """A victim in one stage; A, which its source has told whole, and B, told half by another."""

    shell: Shell
    digest: bool
    a: RequestId
    b: RequestId
    victim: RequestId
    others: tuple[RequestId, ...] = ()  # beside A and B

    @property
    def grant(self) -> StartPrefill:
        """The grant of the victim's first attempt."""
        return self.shell.grant_of(self.victim)

    @property
    def neighbours(self) -> tuple[RequestId, ...]:
        return self.a, self.b, *self.others

    def tell(self, request: RequestId, *spans: Span) -> None:
        self.shell.progress(request, *spans, digests=(DIGEST,) * len(spans) * self.digest)

    def land(self, *requests: RequestId) -> None:
        """Fence what is in flight of these, and check their digests."""
        for command in [c for c in self.shell.given if isinstance(c, StartImport | CheckDigest)]:
            if command.attempt.request in requests:
                self._land(command)

    def _land(self, command: StartImport | CheckDigest) -> None:
        if not self.shell.owner.is_in_flight(command.import_id):
            return
        if isinstance(command, CheckDigest):
            self.shell.checked(command, DIGEST)
            return
        self.shell.done(command.import_id)
        for check in self.shell.all(CheckDigest):
            self._land(check)

    def state(self, request: RequestId) -> HandoffState:
        return self.shell.owner.state_of(request)


def identity_of(grant: StartPrefill) -> Identity:
    return grant.attempt, grant.slot, grant.generation


def leased(*, digest: bool, lanes: int = 4, policy: FailurePolicy | None = None) -> Scene:
    shell = Shell(lanes=lanes, slots=(3, 2, 1), kinds=HYBRID, chunk_nbytes=SEVERAL_CHUNKS, depth=2)
    a, b = (shell.submit(N, digest=digest) for _ in range(2))
    scene = Scene(shell, digest, a, b, a)
    scene.tell(a, WHOLE)
    shell.final(a)
    shell.released(a)
    scene.tell(b, HALF)
    shell.begin(BUDGET)
    scene.tell(b, Span(2, 3, 0, N))
    scene.victim = shell.submit(N, digest=digest, policy=policy)
    assert [shell.grant_of(r).source for r in (a, b, scene.victim)] == [0, 1, 0]
    return scene


def parked(*, digest: bool) -> Scene:
    return leased(digest=digest, lanes=2)


def half_told(*, digest: bool, policy: FailurePolicy | None = None) -> Scene:
    scene = leased(digest=digest, policy=policy)
    scene.tell(scene.victim, HALF)
    scene.shell.begin(BUDGET)
    return scene


def told(*, digest: bool) -> Scene:
    scene = half_told(digest=digest)
    scene.tell(scene.victim, REST)
    return scene


def sealed(*, digest: bool) -> Scene:
    scene = told(digest=digest)
    scene.shell.final(scene.victim)
    return scene


def released(*, digest: bool) -> Scene:
    scene = sealed(digest=digest)
    scene.shell.released(scene.victim)
    return scene


def published(*, digest: bool) -> Scene:
    scene = sealed(digest=digest)
    scene.shell.begin(BUDGET)
    scene.land(scene.victim)
    scene.shell.publish(scene.victim)
    return scene


def draining(*, digest: bool) -> Scene:
    scene = half_told(digest=digest)
    scene.shell.cancel(scene.victim)
    return scene


def returned(*, digest: bool) -> Scene:
    """As it drains, its source has given the slot back, and an import still reads it."""
    scene = draining(digest=digest)
    scene.shell.released(scene.victim)
    return scene


def ended(*, digest: bool) -> Scene:
    scene = draining(digest=digest)
    scene.land(scene.victim)
    scene.shell.released(scene.victim)
    return scene


def reused(*, digest: bool) -> Scene:
    """The victim's slot is another's now, at the next generation."""
    scene = ended(digest=digest)
    new = scene.shell.submit(N, digest=digest)
    scene.others = (new,)
    now, then = scene.shell.grant_of(new), scene.grant
    assert (now.source, now.slot, now.generation) == (then.source, then.slot, then.generation + 1)
    scene.tell(new, HALF)
    return scene


def given_up(*, digest: bool) -> Scene:
    """The first attempt failed and drains; another will follow."""
    scene = half_told(digest=digest, policy=FailurePolicy(2))
    scene.shell.failed(scene.victim)
    return scene


def retried(*, digest: bool) -> Scene:
    """The second attempt is told by another source."""
    scene = given_up(digest=digest)
    scene.shell.released(scene.victim)
    scene.land(scene.victim)
    grant = scene.shell.all(StartPrefill)[-1]
    assert (grant.attempt, grant.source) == (AttemptId(*scene.victim, 2), 2)
    return scene


def dead(*, digest: bool) -> Scene:
    scene = half_told(digest=digest)
    scene.shell.died(0)
    return scene


UNDECIDED = (leased, parked, half_told, told, sealed, released)
DECIDED = (published, draining, returned, given_up, ended, reused, retried, dead)
STAGES = {stage.__name__: stage for stage in (*UNDECIDED, *DECIDED)}


@cache
def _frozen(stage: str, digest: bool) -> bytes:
    return pickle.dumps(STAGES[stage](digest=digest))


def scene_at(stage: str, *, digest: bool = False) -> Scene:
    """A scene of its own, in this stage."""
    scene: Scene = pickle.loads(_frozen(stage, digest))
    return scene


@cache
def all_cases(*, digest: bool) -> tuple[Case, ...]:
    """For the victim, which is the same in every scene."""
    scene = scene_at("leased", digest=digest)
    attempt, slot, generation = identity_of(scene.grant)
    prefill = msgspec.structs.replace(
        grant(N, digest=digest), attempt=attempt, slot=slot, generation=generation
    )
    others = [identity_of(scene.shell.grant_of(scene.b))]
    return tuple(cases(PLAN, prefill, others=others))


def is_readable(case: Case) -> bool:
    """Whether all its packets are messages."""
    return case.counted != ("undecodable",)


# What an owner holds.


_ONLY_THAT_THEY_ARE_THERE: dict[type, Callable[[Any], Any]] = {
    Plan: lambda _: (str, ("a plan",)),
    MethodType: lambda _: (str, ("a method",)),
}


def facts(thing: object) -> bytes:
    """Everything that a thing holds; equal before and after an event that left no trace."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out)
    pickler.dispatch_table = _ONLY_THAT_THEY_ARE_THERE
    pickler.dump(thing)
    return out.getvalue()


def all_but_drops(scene: Scene) -> bytes:
    held = vars(scene.shell.owner)
    return facts({name: value for name, value in held.items() if name != "dropped"})


def all_but_victim(scene: Scene) -> bytes:
    """What is not the victim's: the neighbours, all other slots, the lanes set apart."""
    owner, theirs = scene.shell.owner, scene.neighbours
    victims = owner._sources[scene.grant.source].slots[scene.grant.slot]
    mine = victims.holder is not None and victims.holder.request == scene.victim
    return facts(
        [
            {request: owner._requests.get(request) for request in theirs},
            {i: record for i, record in owner._imports.items() if _request(record) in theirs},
            [
                [source.dead, source.ending, [s for s in source.slots if s is not victims]]
                for source in owner._sources.values()
            ],
            [] if mine else [s for s in [victims] if s.holder is not None],
            owner._lanes_quarantined,
            owner._next_request,
            owner._next_import,
        ]
    )


def _request(record: Any) -> RequestId:
    request: RequestId = record.handoff.attempt.request
    return request


# How a scene hears a packet, and how it goes on.


def take_in(
    owner: Owner, source: SourceId, manifest: Manifest, receive: Callable[[], FromSource]
) -> None:
    """What `Sources` does with a packet of a source that has this manifest."""
    try:
        message = receive()
    except RemoteProtocolError as exc:
        owner.undecodable(source, str(exc), 0)
        return
    if not isinstance(message, AttemptMessage):
        owner.dropped["unexpected"] += 1
        return
    fault = _fault_of(manifest, message) if isinstance(message, SourceFinal) else ""
    owner.message(source, message, 0, fault)


@contextmanager
def ears() -> Iterator[Hear]:
    """Takes in a packet of the victim's source, over a real channel."""
    near, far = socket_pair(4, MAX_MESSAGE_NBYTES)
    channel: Channel[FromSource, FromSource] = Channel(far, encode, decode_from_source)

    def receive(scene: Scene, payload: bytes) -> None:
        near.send(payload)
        take_in(scene.shell.owner, scene.grant.source, MANIFEST, lambda: channel.receive()[0])
        scene.shell.take()

    with near, channel:
        yield receive


def ends_of(scene: Scene, request: RequestId) -> list[Outcome]:
    return [r.outcome for r in scene.shell.all(Report) if r.request == request]


def finish(scene: Scene) -> None:
    """Everybody else is published whole, the slots and lanes come back, and the next is served."""
    shell, owner = scene.shell, scene.shell.owner
    shell.cancel(scene.victim)  # unless it has ended, or was given up for good
    for request in (scene.b, *scene.others):
        scene.tell(request, REST if request != scene.b else Span(3, 5, 0, N))
        shell.final(request)
        shell.released(request)
    shell.begin(BUDGET)
    scene.land(*scene.neighbours, scene.victim)
    if scene.state(scene.victim) is HandoffState.PUBLISHED:
        shell.retire(scene.victim)
    for source_id, source in owner._sources.items():
        if source.running is not None:
            granted = next(g for g in shell.all(StartPrefill) if g.attempt == source.running)
            assert granted.attempt.request == scene.victim
            shell.send(Released(*identity_of(granted)), source_id)
    for request in scene.neighbours:
        shell.publish(request)
        assert ends_of(scene, request) == [Outcome.PUBLISHED]
        assert_whole(scene, request)
        shell.retire(request)
    assert len(ends_of(scene, scene.victim)) == 1
    assert owner.statistics()["lanes"]["free"] == owner.limits.num_lanes
    for slot in (slot for source in owner._sources.values() for slot in source.slots):
        assert slot.state is SlotState.FREE
    after = shell.submit(N, digest=scene.digest)
    scene.tell(after, WHOLE)
    shell.final(after)
    shell.released(after)
    shell.begin(BUDGET)
    scene.land(after)
    shell.publish(after)
    assert_whole(scene, after)


def assert_whole(scene: Scene, request: RequestId) -> None:
    """Each cell was imported once, all from the request's own slot."""
    shell = scene.shell
    grant = shell.grant_of(request)
    imports = [c for c in shell.all(StartImport) if c.attempt == grant.attempt]
    assert {(c.source, c.slot) for c in imports} == {(grant.source, grant.slot)}
    cells = cells_of(PLAN, *(c.piece for c in imports))
    assert sorted(cells) == sorted(cells_of(PLAN, WHOLE))
    assert len([p for p in shell.all(Publish) if p.attempt == grant.attempt]) == 1


def victim_of(scene: Scene) -> Handoff | None:
    entry = scene.shell.owner._requests.get(scene.victim)
    return None if entry is None else entry.handoff


def claims_of(handoff: Handoff | None) -> bytes:
    return facts(handoff and handoff._claimed)
