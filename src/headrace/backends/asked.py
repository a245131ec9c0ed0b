"""Whether what an engine is called with is of one attempt."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backends.base import PrefillSink
from headrace.errors import LocalProtocolError


def check_asked(tokens: Sequence[int], sink: PrefillSink, start: int) -> None:
    """Check that tokens, start, plan and grant are of one attempt.

    Raises:
        LocalProtocolError: they are not, or `start` is not the last place where the computation is
            cut, so that the decoder's cells before it would be others than a cold run's.
    """
    plan, cuts = sink.plan, sink.options.cuts
    if len(tokens) != plan.num_tokens or not 0 <= start < plan.num_tokens:
        raise LocalProtocolError(
            f"{len(tokens)} tokens from position {start}, the plan has {plan.num_tokens}"
        )
    if plan.start != start:
        raise LocalProtocolError(f"asked from position {start}, the plan begins at {plan.start}")
    if start and (not cuts or cuts[-1] != start):
        raise LocalProtocolError(
            f"asked from position {start}, which is not the last of the cuts {list(cuts)}"
        )
