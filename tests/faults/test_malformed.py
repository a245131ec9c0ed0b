"""Everything wrong that a source can say, said by a real source over the real channel.

One source misbehaves, case by case, and lives on. Meanwhile another is in the middle of telling a
neighbour's cells, which come out exact; so does the next request, served by the source that
misbehaved.
"""

from __future__ import annotations

import os
import select
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.ids import AttemptId, SourceId
from headrace.messages import Ended, Events, decode_from_owner, encode
from headrace.plan import compile_plan
from headrace.runtime.requests import Request
from headrace.runtime.worker import SourceHandle
from headrace.telemetry.chrome import encode as encode_trace
from headrace.telemetry.clocks import align
from headrace.telemetry.page import page
from headrace.telemetry.recording import Recording, Run
from headrace.telemetry.report import report_of
from headrace.telemetry.timeline import draw
from headrace.testing.malformed import Case, cases
from headrace.testing.sinks import ask
from tests.faults.engines import TOKEN_OF, case_prompt
from tests.faults.lab import (
    CONTEXT,
    GATED,
    GEOMETRY,
    LAYERS,
    NUM_TOKENS,
    WITHIN_S,
    Gate,
    Lab,
    prompt,
)

ROGUE = "tests.faults.engines:open_rogue"
OPTIONS = {**GEOMETRY, "vocab_size": 2000}
GOOD, BAD = SourceId(0), SourceId(1)
STEPS = LAYERS + 2  # of the gated source: its commits, its final and its return
HALF = 3
CLOSING = ("late", "stale")  # the engine's own last words come after those of the case


class Stage(Lab):
    """A lab with a gated source, and a second one that misbehaves and tells when it has."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, lanes=3, engine=GATED, options=OPTIONS)
        gate = Gate(directory / "gate-rogue")
        os.mkfifo(f"{gate.path}.told")
        self._told = os.open(f"{gate.path}.told", os.O_RDWR | os.O_CLOEXEC)
        self.rogue = SourceHandle(ROGUE, {**OPTIONS, "gate": str(gate.path)}, num_slots=2)
        self.gates.append(gate)
        self.handles.append(self.rogue)
        self.rogue.start()
        self.owner.attach(self.rogue)

    def close(self) -> None:
        super().close()
        os.close(self._told)

    def begin_neighbour(self, seed: int) -> Request:
        """A request of the gated source, which has told half of it."""
        neighbour = self.submit(prompt(seed), hold=True)
        self.gates[0].allow(HALF)
        self.until_told(neighbour, HALF)
        return neighbour

    def finish_neighbour(self, neighbour: Request, seed: int) -> None:
        self.gates[0].allow(STEPS - HALF)
        self.until_done(neighbour)
        self.assert_exact(neighbour, prompt(seed))
        assert neighbour.entry is not None
        self.assert_rest_of_lane(neighbour.entry.lane)
        self.owner.release(neighbour)
        self.settle()

    def order(
        self, case: Case, neighbour: Request, last: Request, **options: Any
    ) -> tuple[Request, list[int]]:
        """Have the rogue send a case; the owner reads nothing before all of it is sent.

        Returns the request and its prompt.
        """
        back = last.request.counter + 1 - neighbour.request.counter
        slots = self.owner._machine._sources[GOOD].slots
        (slot,) = [s for s in slots if s.holder == AttemptId(*neighbour.request, 1)]
        tokens = case_prompt(case.name, back, slot.index, slot.generation)
        tokens += prompt(1)[len(tokens) :]
        request = self.submit(tokens, hold=True, **options)
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        assert poll.poll(WITHIN_S * 1000), f"not told: {case.name}"
        os.read(self._told, 1)
        return request, tokens

    def until_rogue_is_free(self) -> None:
        source = self.owner._machine._sources[BAD]
        self.until(
            lambda: source.running is None and source.slots.num_free == len(source.slots),
            "the source that misbehaved has given its slots back",
        )


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("malformed")) as stage:
        yield stage


def all_cases() -> list[Case]:
    """Those of the stage's plan, for a grant of slot 0 that is not the first one."""
    manifest = open_replay(OPTIONS).manifest()
    plan = compile_plan(decoder_like(manifest), manifest.layouts[0], NUM_TOKENS, CONTEXT)
    grant = msgspec.structs.replace(ask(NUM_TOKENS), attempt=AttemptId(1, 2, 1), generation=1)
    return list(cases(plan, grant, others=[(AttemptId(1, 1, 1), 1, 77)]))


KINDS = list(dict.fromkeys(case.kind for case in all_cases()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_attempt_fails_and_the_neighbour_is_exact(stage: Stage, kind: str) -> None:
    pid = stage.rogue.pid
    stage.fill_canaries()
    last = neighbour = stage.begin_neighbour(2)
    for case in all_cases():
        if case.kind == kind:
            last = bring(stage, case, neighbour, last)
    after = stage.submit(prompt(3), hold=True)
    stage.until_done(after)
    stage.assert_exact(after, prompt(3))
    stage.owner.release(after)
    assert not neighbour.done
    stage.finish_neighbour(neighbour, 2)
    assert stage.rogue.pid == pid
    assert not stage.rogue.died()


def bring(stage: Stage, case: Case, neighbour: Request, last: Request) -> Request:
    """Bring one case and check what became of it; returns its request."""
    before = Counter(stage.counts("dropped"))
    request, tokens = stage.order(case, neighbour, last)
    stage.until_done(request)
    if case.verdict == "fails":
        assert request.outcome == "failed", case
        assert "there is no case" not in request.reason
        assert request.entry is None
        assert case.cause is not None
        assert request.cause == case.cause.value, (case, request.reason)
    else:
        assert request.outcome == "finished", (case, request.reason)
        stage.assert_exact(request, tokens)
        stage.owner.release(request)
    stage.until_rogue_is_free()
    counted, due = Counter(stage.counts("dropped")) - before, Counter(case.counted)
    for name in CLOSING:
        assert counted.pop(name, 0) >= due.pop(name, 0), case
    assert counted == due, case
    return request


ONE_OF_EACH = list({case.kind: case for case in all_cases() if case.verdict == "fails"}.values())


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.kind)
def test_the_next_attempt_is_exact(stage: Stage, case: Case) -> None:
    """It is made by the other source, once that has told the neighbour."""
    neighbour = stage.begin_neighbour(4)
    request, tokens = stage.order(case, neighbour, neighbour, on_failure="retry")
    stage.until(lambda: request.attempts != [], "the first attempt failed")
    stage.until_rogue_is_free()
    assert not request.done
    stage.gates[0].allow(STEPS - HALF + STEPS)
    stage.until_done(neighbour, request)
    assert (request.outcome, len(request.attempts)) == ("finished", 1)
    for held, its_tokens in ((neighbour, prompt(4)), (request, tokens)):
        stage.assert_exact(held, its_tokens)
        stage.owner.release(held)
    stage.settle()


def test_a_clock_that_runs_wild_spoils_no_more_than_its_own_times(stage: Stage) -> None:
    neighbour = stage.begin_neighbour(5)
    tokens = [TOKEN_OF["wild clock"], *prompt(6)[1:]]
    request = stage.submit(tokens, hold=True, trace=True)
    stage.until_done(request)
    assert request.outcome == "finished", request.reason
    stage.assert_exact(request, tokens)
    measured = request.measured
    assert measured is not None
    told = Ended(0, "finished", "", "", measured, "", (), "", (), None)
    source, owner = tuple(request.source_intervals), tuple(request.owner_intervals)
    for message in (Events(0, "source", source), Events(0, "owner", owner), told):
        assert decode_from_owner(encode(message)) == message
    run = Run(
        name="wild",
        route="whole",
        num_tokens=len(tokens),
        outcome=request.outcome,
        source=source,
        owner=owner,
        measured=measured,
    )
    assert len(draw(align(run))) == 4
    told_of = report_of(align(run))
    assert told_of.tail_ns is None or sum(told_of.parts_ns.values()) == told_of.tail_ns
    recording = Recording(runs=(run,))
    assert encode_trace(recording)
    assert page(recording, "wild")
    stage.owner.release(request)
    stage.finish_neighbour(neighbour, 5)
