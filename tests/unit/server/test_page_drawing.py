"""The swimlanes' cost; what they show is in `test_recent`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.server.layer_groups import layer_groups
from headrace.server.page_drawing import draw
from headrace.telemetry.recording import Run
from tests.unit.telemetry.cost import GROWTH, deep, growth, many


@pytest.mark.parametrize("make", [many, deep])
def test_twice_the_layer_groups_are_twice_the_work_to_draw(make: Callable[[int], Run]) -> None:
    assert growth(lambda run: draw(1, 0, run), make) < GROWTH


@pytest.mark.parametrize("make", [many, deep])
def test_twice_the_layer_groups_are_twice_the_work_to_tell_apart(
    make: Callable[[int], Run],
) -> None:
    assert growth(lambda run: layer_groups(run.source, run.owner), make) < GROWTH
