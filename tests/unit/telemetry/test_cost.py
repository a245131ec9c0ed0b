"""What a trace costs grows with its size, and not with the square of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from headrace.telemetry.chrome import encode
from headrace.telemetry.clocks import align
from headrace.telemetry.page import page
from headrace.telemetry.recording import Recording, Run
from headrace.telemetry.report import report_of, reports_of
from headrace.telemetry.timeline import draw
from tests.unit.telemetry.cost import GROWTH, deep, growth, many, work
from tests.unit.telemetry.scenes import at, on, whole

USES: dict[str, Callable[[Run], object]] = {
    "a trace file": lambda run: encode(Recording(runs=(run,))),
    "a page": lambda run: page(Recording(runs=(run,)), "a trace"),
    "the figures": lambda run: report_of(align(run)),
    "lines of text": lambda run: draw(align(run)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("make", [many, deep, partial(many, clock="device", error_ns=5)])
def test_twice_the_layer_groups_are_twice_the_work(use: str, make: Callable[[int], Run]) -> None:
    assert growth(USES[use], make) < GROWTH


def test_twice_the_runs_are_twice_the_work() -> None:
    """None of them tells what an import takes alone: in each, others decoded in the tail."""
    run = on("host", whole(), "import")
    run = replace(run, owner=(*run.owner, at("neighbour", 4_850, 4_900, name="another")))

    def figures(num_runs: int) -> int:
        runs = [align(run) for _ in range(num_runs)]
        return work(lambda: reports_of(runs))

    assert figures(40) / figures(20) < GROWTH


def test_a_square_would_be_found() -> None:
    def square(run: Run) -> int:
        return sum(one is other for one in run.owner for other in run.owner)

    assert growth(square, many) > 3.5
