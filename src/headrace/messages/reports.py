"""What an owner reports of one request: its intervals, its figures, its end."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from headrace.messages.base import (
    MAX_ATTEMPTS,
    MAX_CHOICE_TEXT,
    MAX_INTERVALS,
    Count,
    Lane,
    Remainder,
    Route,
    Text,
    WireMessage,
)

IntervalKind: TypeAlias = Literal[
    "compute",
    "write",
    "announced",
    "final",
    "granted",
    "parked",
    "validated",
    "import",
    "neighbour",
    "published",
    "first_token",
    "decode",
    "cancel",
    "ended",
    "drain",
]


class Interval(WireMessage, frozen=True, tag="interval"):
    """What one process or device did between two readings of its clock; an instant if they agree.

    Of a source: it computes what one progress message tells, writes its cells, has it announced,
    has its final. Of an owner: it sent the grant, kept the attempt parked (from a grant without
    storage until storage was had, or the end), validated a progress message, imported one piece
    (begun to fenced), decoded for a neighbour meanwhile, published, chose the first token, decoded
    the request's first step, heard the cancel, gave the terminal, had the storage back (drain).

    clock: `host` is CLOCK_MONOTONIC in ns; `device` is a device's own events, brought to it with an
    error of at most `error_ns`; `fake` are those of a model of a device.
    """

    kind: IntervalKind
    name: Text
    begun_ns: Count
    ended_ns: Count
    nbytes: Count
    clock: Literal["host", "device", "fake"]
    error_ns: Count = 0


class Events(WireMessage, frozen=True, tag="events"):
    """A batch of a request's intervals on one lane, sent before `Ended`.

    More of the owner's follow on `Ended` until the request's storage is free; the last is empty.
    """

    label: Count
    lane: Lane
    intervals: Annotated[tuple[Interval, ...], Meta(max_length=MAX_INTERVALS)]


class Measured(WireMessage, frozen=True, tag="measured"):
    """What one request took, in ns of the host's CLOCK_MONOTONIC and in bytes.

    last_group_ns: when the last layer group lay in the slot. import_ns: the time in which
    imports of it were under way. decode_in_the_way_ns: decode steps of others in the transfer tail.
    storage_ns: when it had decoder storage, 0 where that is not known. parked_ns: for how long it
    held a slot without storage.
    """

    submitted_ns: Count
    prefill_begun_ns: Count
    source_final_ns: Count
    last_group_ns: Count
    published_ns: Count
    first_token_ns: Count
    ended_ns: Count
    kv_nbytes: Count
    nbytes_before_final: Count
    last_group_nbytes: Count
    spans: Count
    groups: Count
    imports: Count
    import_ns: Count
    decode_in_the_way_ns: Count
    storage_ns: Count = 0
    parked_ns: Count = 0

    @property
    def tail_begun_ns(self) -> int:
        """When the transfer tail began: at the source-final time, or later, with the storage.

        What is parked cannot be imported, so waiting for a lane is no part of what a hand-off adds.
        A trace says the same by its intervals: `telemetry.clocks.Aligned.tail`.
        """
        return max(self.source_final_ns, self.storage_ns)

    @property
    def tail_ns(self) -> int:
        """The transfer tail; below 0 if the readings have its end before its beginning."""
        return self.published_ns - self.tail_begun_ns

    @property
    def tail_from_last_group_ns(self) -> int:
        """The same from when the last layer group lay in the slot, or there was storage for it."""
        return self.published_ns - max(self.last_group_ns, self.storage_ns)


ChoiceKind: TypeAlias = Literal[
    "predicted",
    "trial",
    "small-gain",
    "nothing-to-move",
    "whole-only",
    "not-measured",
    "no-alternative",
]


class RouteChoice(WireMessage, frozen=True, tag="choice"):
    """The route that `auto` took for a request, how it is cut, and why.

    kind: why, in a word: it is predicted to be the fastest; whole, to be measured; whole, since
    others gain next to nothing, no byte moves, one side takes whole results only, this machine
    could not be measured, or nothing else can be told.
    """

    route: Route
    group_layers: Count
    chunk: Count
    reason: Annotated[str, Meta(max_length=MAX_CHOICE_TEXT)]
    kind: ChoiceKind = "predicted"


class Reuse(WireMessage, frozen=True, tag="reuse"):
    """What of a prompt was not prefilled, since the decoder had kept it, and why so much.

    positions: the first ones. remainder: who computed the others; none if there were none.
    """

    positions: Count
    remainder: Remainder
    reason: Annotated[str, Meta(max_length=MAX_CHOICE_TEXT)]


class Ended(WireMessage, frozen=True, tag="ended"):
    """The request's one terminal; `mistake` names the option if it was refused as asked.

    Digests are hex, empty unless asked for by `audit`: of every logits row in order, and per layer
    of the published cells. cause: why it was not published, as a word, or empty. attempts: the
    reasons of the attempts that others followed. choice: what route `auto` came to. reuse: what a
    request that asked for it got of kept prompts. local: whether the owner itself computed the last
    attempt.
    """

    label: Count
    outcome: Literal["finished", "failed", "cancelled"]
    reason: Text
    mistake: Text
    measured: Measured | None
    logits_digest: Text
    kv_digests: tuple[Text, ...]
    cause: Text
    attempts: Annotated[tuple[Text, ...], Meta(max_length=MAX_ATTEMPTS)]
    choice: RouteChoice | None
    reuse: Reuse | None = None
    local: bool = False
