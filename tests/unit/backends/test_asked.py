"""An engine is called with what is of one attempt, or says what is not."""

from __future__ import annotations

import pytest

from headrace.backends.asked import check_asked
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import LocalProtocolError
from headrace.plan import compile_plan
from headrace.testing.sinks import MemorySink, ask

SOURCE = open_replay({"layers": 2, "heads": 1, "head_dim": 4}).manifest()


def sink_of(num_tokens: int, start: int, cuts: tuple[int, ...]) -> MemorySink:
    plan = compile_plan(decoder_like(SOURCE), "head_major", num_tokens, 32, start)
    return MemorySink(plan, ask(num_tokens, start=start, cuts=cuts))


@pytest.mark.parametrize(("start", "cuts"), [(0, ()), (0, (3, 5)), (5, (5,)), (5, (2, 5))])
def test_an_attempt_that_fits_passes(start: int, cuts: tuple[int, ...]) -> None:
    check_asked([0] * 8, sink_of(8, start, cuts), start)


@pytest.mark.parametrize(
    ("num_tokens", "start", "planned", "cuts", "said"),
    [
        (7, 0, 0, (), "7 tokens from position 0, the plan has 8"),
        (9, 0, 0, (), "9 tokens from position 0, the plan has 8"),
        (0, 0, 0, (), "0 tokens"),
        (8, 8, 0, (), "8 tokens from position 8"),
        (8, -1, 0, (), "from position -1"),
        (8, 0, 5, (5,), "asked from position 0, the plan begins at 5"),
        (8, 5, 0, (5,), "asked from position 5, the plan begins at 0"),
        (8, 5, 5, (), r"not the last of the cuts \[\]"),
        (8, 5, 5, (4,), r"not the last of the cuts \[4\]"),
        (8, 5, 5, (5, 6), r"not the last of the cuts \[5, 6\]"),
    ],
)
def test_what_does_not_fit_is_told(
    num_tokens: int, start: int, planned: int, cuts: tuple[int, ...], said: str
) -> None:
    with pytest.raises(LocalProtocolError, match=said):
        check_asked([0] * num_tokens, sink_of(8, planned, cuts), start)
