"""The closed sets of label values: nothing that a client or a peer wrote becomes a label."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, get_args

from headrace.messages import Ended, Route, SourceState
from headrace.protocol.commands import Cause
from headrace.protocol.slots import SlotState
from headrace.runtime.lanes import LOCAL_GRANT
from headrace.server.events import ChoiceEnded, DecoderState

OTHER: Final = "other"
"""What is in no closed set; there should be none of it."""

FINISHED_REASONS: Final = ("stop", "length", "abort", "error")
TOKEN_SOURCES: Final = ("transferred", "cached", "computed")
FALLBACKS: Final = ("retry", "local")
DECODER_STATES: Final[tuple[str, ...]] = get_args(DecoderState)
SOURCE_STATES: Final[tuple[str, ...]] = get_args(SourceState)
SLOT_STATES: Final = tuple(state.name.lower() for state in SlotState)
LANE_STATES: Final = ("free", "reserved", "published", "draining", "quarantined")
ROUTES: Final[tuple[str, ...]] = get_args(Route)
OUTCOMES: Final = ("finished", "refused", *(cause.value for cause in Cause))
REJECTS: Final = ("stale", "late", "dead", "malformed", "undecodable", "unexpected")
"""Of an old lease, after the end, of a dead source, against the plan, no message, of no attempt."""

ASKED: Final = "asked"
_ROUTE_REASONS: Final = (
    ("predicted ", "predicted"),
    ("tried, to be measured", "trial"),
    ("would gain less than", "small-gain"),
    ("nothing to move", "nothing-to-move"),
    ("take whole results only", "whole-only"),
    ("could not be measured", "not-measured"),
    ("nothing else can be told", "no-alternative"),
)
ROUTE_REASONS: Final = (ASKED, *(word for _, word in _ROUTE_REASONS), OTHER)


def one_of(value: str, allowed: Collection[str]) -> str:
    """`value` if it is one of `allowed`, else `other`."""
    return value if value in allowed else OTHER


def route_reason(text: str) -> str:
    """Why `auto` took a route, as a word, from the sentence that it tells a reader."""
    return next((word for part, word in _ROUTE_REASONS if part in text), OTHER)


def outcome_of(ended: Ended) -> str:
    """What became of a hand-off: finished, refused as asked, or the cause of its failure."""
    if ended.mistake:
        return "refused"
    return "finished" if ended.outcome == "finished" else one_of(ended.cause, OUTCOMES)


def is_local(event: ChoiceEnded) -> bool:
    """Whether the owner computed the prompt by itself, as a traced request tells it."""
    intervals = event.owner_intervals  # of its last attempt
    return any(each.kind == "granted" and each.name == LOCAL_GRANT for each in intervals)
