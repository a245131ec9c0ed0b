"""The closed sets of label values: nothing that a client or a peer wrote becomes a label."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, get_args

from headrace.messages import ChoiceKind, Ended, Route, SourceState
from headrace.protocol.commands import Cause
from headrace.protocol.slots import SlotState
from headrace.server.events import DecoderState, Endpoint

OTHER: Final = "other"
"""What is in no closed set; there should be none of it."""

FINISHED_REASONS: Final = ("stop", "length", "abort", "error")
TOKEN_SOURCES: Final = ("transferred", "cached", "computed")
FALLBACKS: Final = ("retry", "local")
ENDPOINTS: Final[tuple[str, ...]] = get_args(Endpoint)
DECODER_STATES: Final[tuple[str, ...]] = get_args(DecoderState)
SOURCE_STATES: Final[tuple[str, ...]] = get_args(SourceState)
SLOT_STATES: Final = tuple(state.name.lower() for state in SlotState)
LANE_STATES: Final = ("free", "reserved", "published", "draining", "quarantined")
ROUTES: Final[tuple[str, ...]] = get_args(Route)
OUTCOMES: Final = ("finished", "refused", *(cause.value for cause in Cause))
REJECTS: Final = ("stale", "late", "dead", "malformed", "undecodable", "unexpected")
"""Of an old lease, after the end, of a dead source, against the plan, no message, of no attempt."""

ASKED: Final = "asked"
ROUTE_REASONS: Final[tuple[str, ...]] = (ASKED, *get_args(ChoiceKind), OTHER)


def one_of(value: str, allowed: Collection[str]) -> str:
    """`value` if it is one of `allowed`, else `other`."""
    return value if value in allowed else OTHER


def outcome_of(ended: Ended) -> str:
    """What became of a hand-off: finished, refused as asked, or the cause of its failure."""
    if ended.mistake:
        return "refused"
    return "finished" if ended.outcome == "finished" else one_of(ended.cause, OUTCOMES)
