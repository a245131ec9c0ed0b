"""Spans that were announced before they were written are found, and told where they are.

What is missing may come before the import (then the digest tells) or after it (then the poison that
lies there does). A request without either is shown to be wrong, and nobody the wiser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import Fence, Reservation, SlotView
from headrace.errors import Refused
from headrace.plan import Copy
from headrace.runtime.requests import Request
from tests.faults.failing_engines import faulty
from tests.faults.lab import GEOMETRY, LAYERS, NUM_TOKENS, WITHIN_S, Lab, expected_cells, prompt

LIMITS: dict[str, Any] = {"drain_timeout_s": WITHIN_S}
LATE = "tests.faults.failing_engines:open_late"
SLIDING, FULL = 3, 2  # layers; the sliding one's live tail begins at NUM_TOKENS - 16
TAIL = NUM_TOKENS - 16
KINDS = ("torn", "stale", "early")
ROUTES = ("streamed", "whole")


@contextmanager
def lab(directory: Path, **late: Any) -> Iterator[Lab]:
    options = {**GEOMETRY, "late": {"layers": [FULL], **late}}
    with Lab(directory, lanes=3, slots=3, engine=LATE, options=options, **LIMITS) as made:
        yield made


def missing(kind: str, layer: int) -> str:
    """Where a reason says that rows were not written."""
    first = TAIL if layer == SLIDING else 0
    start = (first + NUM_TOKENS) // 2 if kind == "torn" else first
    return re.escape(f"layer {layer} part k positions [{start}, {NUM_TOKENS})")


def used(made: Lab) -> None:
    """Every slot has held another request's cells: what is not written is theirs."""
    requests = [made.submit(prompt(seed), hold=True) for seed in (50, 51, 52)]
    made.until_done(*requests)
    for request in requests:
        made.owner.release(request)
    made.settle()


def with_neighbour(made: Lab, options: dict[str, Any]) -> tuple[Request, Request]:
    """A faulty request and one beside it."""
    neighbour = made.submit(prompt(2), hold=True)
    made.until_done(neighbour)
    return made.submit(faulty(1), hold=True, **options), neighbour


def let_go(made: Lab) -> None:
    made.gate.allow(1000)


def finish(made: Lab, neighbour: Request) -> None:
    made.assert_exact(neighbour, prompt(2))
    made.owner.release(neighbour)
    made.settle()
    made.serve_exact(9, digest=True, poison=True)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layer", [FULL, SLIDING])
@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_finds_what_comes_after_the_import(
    tmp_path: Path, kind: str, layer: int, route: str
) -> None:
    """Its stamp was made over the same bytes that landed: only the poison shows it."""
    with lab(tmp_path, kind=kind, layers=[layer]) as made:
        used(made)
        broken, neighbour = with_neighbour(made, {"route": route, "digest": True})
        made.until_done(broken)
        assert (broken.outcome, broken.cause) == ("failed", "corrupt")
        assert re.search(missing(kind, layer), broken.reason), broken.reason
        assert f"layers [{layer}, {layer + 1}) x positions [0, {NUM_TOKENS})" in broken.reason
        assert broken.entry is None
        let_go(made)
        finish(made, neighbour)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layer", [FULL, SLIDING])
@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_finds_what_comes_before_the_import(
    tmp_path: Path, kind: str, layer: int, route: str
) -> None:
    """The right bytes landed, but they are not those that were stamped."""
    with lab(tmp_path, kind=kind, layers=[layer], moment="stamped") as made:
        used(made)
        broken, neighbour = with_neighbour(made, {"route": route, "digest": True})
        made.until_done(broken)
        assert (broken.outcome, broken.cause) == ("failed", "corrupt")
        assert f"digest of layers [{layer}, {layer + 1})" in broken.reason
        finish(made, neighbour)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layer", [FULL, SLIDING])
@pytest.mark.parametrize("kind", KINDS)
def test_poison_alone_finds_it_before_publishing(
    tmp_path: Path, kind: str, layer: int, route: str
) -> None:
    with lab(tmp_path, kind=kind, layers=[layer]) as made:
        used(made)
        broken, neighbour = with_neighbour(made, {"route": route, "poison": True})
        made.until_told(broken, layer + 1 if route == "streamed" else 1)
        made.owner.turn(0.0)  # what was told is imported
        let_go(made)
        made.until_done(broken)
        assert (broken.outcome, broken.cause) == ("failed", "corrupt")
        assert re.search(missing(kind, layer), broken.reason), broken.reason
        assert "never written" in broken.reason
        assert made.counts("requests")["poison_found"] == 1
        assert made.counts("lanes")["quarantined"] == 0  # the storage itself is sound
        finish(made, neighbour)


def test_several_places_are_named(tmp_path: Path) -> None:
    with lab(tmp_path, kind="stale", layers=list(range(LAYERS))) as made:
        broken, neighbour = with_neighbour(made, {"route": "whole", "poison": True})
        made.until_told(broken, 1)
        made.owner.turn(0.0)  # what was told is imported
        let_go(made)
        made.until_done(broken)
        assert "layer 0 part k positions" in broken.reason
        assert "layer 0 part v positions" in broken.reason
        assert f"and {2 * LAYERS - 3} more parts were never written" in broken.reason
        finish(made, neighbour)


def test_without_either_nobody_notices(tmp_path: Path) -> None:
    """Which is what the two are for: old bytes are published as this prompt's."""
    with lab(tmp_path, kind="stale") as made:
        used(made)
        let_go(made)
        wrong = made.submit(faulty(1), hold=True)
        made.until_done(wrong)
        assert wrong.outcome == "finished"
        found, right = made.cells_of(wrong), expected_cells(faulty(1))
        assert {layer for layer, part in right if found[layer, part] != right[layer, part]} == {
            FULL
        }
        made.owner.release(wrong)
        made.settle()


@pytest.mark.parametrize("asked", [{"digest": True}, {"poison": True}])
def test_a_retry_is_guarded_as_well(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Attempt 2 has the storage of attempt 1, whose cells must not pass for its own."""
    with lab(tmp_path, kind="stale", attempts=[1, 2]) as made:
        used(made)
        let_go(made)
        request = made.submit(faulty(1), hold=True, on_failure="retry", max_attempts=3, **asked)
        made.until_done(request)
        assert (request.outcome, request.cause) == ("finished", ""), request.reason
        assert len(request.attempts) == 2
        for reason in request.attempts:
            assert re.search(missing("stale", FULL), reason), reason
        made.assert_exact(request, faulty(1))
        made.owner.release(request)
        made.settle()


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
def test_what_is_well_written_passes(tmp_path: Path, route: str) -> None:
    with lab(tmp_path, kind="stale") as made:
        used(made)
        for asked in ({"digest": True}, {"poison": True}, {"digest": True, "poison": True}):
            for seed in (1, 2):
                made.serve_exact(seed, route=route, chunk=7, **asked)


# The reserved storage.


def test_imports_wait_for_the_poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is begun before the poison is fenced might be overwritten by it."""
    with Lab(tmp_path) as made:
        made.gate.open()
        made.decoder.hold_fences = True
        begun: list[int] = []
        begin_import = made.decoder.begin_import

        def counted(held: Reservation, slot: SlotView, copies: Sequence[Copy]) -> Fence:
            begun.append(len(copies))
            return begin_import(held, slot, copies)

        monkeypatch.setattr(made.decoder, "begin_import", counted)
        request = made.submit(prompt(1), hold=True, poison=True)
        made.until(lambda: made.counts("handoffs").get("sealed") == 1, "all told, nothing fenced")
        assert begun == [2 * LAYERS]  # the poison, with all copies of the plan
        made.decoder.hold_fences = False
        made.until_done(request)
        assert begun[1:] == [2] * LAYERS
        made.assert_exact(request, prompt(1))
        made.owner.release(request)
        made.settle()


def test_poison_that_is_never_fenced_is_a_fault_of_the_device(tmp_path: Path) -> None:
    with Lab(tmp_path, drain_timeout_s=0.3) as made:
        made.gate.open()
        made.decoder.hold_fences = True
        request = made.submit(prompt(1), poison=True)
        made.until_done(request)
        assert (request.outcome, request.cause) == ("failed", "device")
        assert request.reason == "an import was not fenced in time"
        made.until_count("lanes", "quarantined", 1)
        made.decoder.hold_fences = False
        made.until_count("slots", "quarantined", 1)


def test_poison_that_cannot_be_copied_is_a_fault_of_the_device(tmp_path: Path) -> None:
    with Lab(tmp_path, drain_timeout_s=0.3) as made:
        made.gate.open()
        made.decoder.fail_imports = 0
        request = made.submit(prompt(1), poison=True, on_failure="retry")
        made.until_done(request)
        assert (request.outcome, request.cause) == ("failed", "device")
        assert request.attempts == []
        made.decoder.fail_imports = None
        made.until_count("slots", "quarantined", 1)


def test_too_little_memory_for_the_poison_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lab(tmp_path) as made:
        monkeypatch.setattr("headrace.engine.capacity.available_nbytes", lambda: 0)
        with pytest.raises(Refused, match="a slot full of poison: needs"):
            made.submit(prompt(1), poison=True)
        monkeypatch.undo()
        made.gate.open()
        made.serve_exact(1, poison=True)
        assert made.counts("requests")["poison_nbytes"] > 0
