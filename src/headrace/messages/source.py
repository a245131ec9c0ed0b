"""What an owner and its sources say to each other."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from headrace.geometry import Emission, Manifest
from headrace.ids import AttemptId, Span
from headrace.messages.base import MAX_CUTS, MAX_SPANS, Count, Route, Text, WireMessage, WireStruct


class DeviceTimes(WireStruct, frozen=True):
    """When a device did something, by its own events, brought to the host's CLOCK_MONOTONIC in ns.

    error_ns: by how much the two readings may be off, since the clocks were compared from outside.
    kind: `fake` where the device is a model of one, of whose times nothing may be claimed.
    """

    begun_ns: Count
    ended_ns: Count
    error_ns: Count
    kind: Literal["real", "fake"] = "real"


# Owner to source.


class Hello(WireMessage, frozen=True, tag="hello"):
    """The first message: what the source must agree with; the slab's descriptor rides beside it."""

    epoch: Count
    decoder: Manifest
    context: Count
    num_slots: Count
    slot_nbytes: Count


class Prefill(WireMessage, frozen=True, tag="prefill"):
    """Grants the write lease of a slot, which already holds the prompt of `num_tokens` ids.

    group_layers: layers of one layer group. chunk: positions of one transfer chunk, 0 = all.
    prefill_chunk: positions computed at once, 0 = all. digest: stamp every span. start: the first
    position to emit, since the decoder has those before it. cuts: positions, ascending, at which
    the computation is cut beside `prefill_chunk`, which counts anew from each.
    """

    attempt: AttemptId
    slot: Count
    generation: Count
    num_tokens: Count
    route: Route
    group_layers: Count
    chunk: Count
    prefill_chunk: Count
    emission: Emission
    digest: bool
    start: Count = 0
    cuts: Annotated[tuple[Count, ...], Meta(max_length=MAX_CUTS)] = ()


class Cancel(WireMessage, frozen=True, tag="cancel"):
    """The attempt is no longer wanted; the source stops at its next sink call."""

    attempt: AttemptId


class Shutdown(WireMessage, frozen=True, tag="shutdown"):
    """Finish nothing new and exit."""


# Source to owner.


class Ready(WireMessage, frozen=True, tag="ready"):
    """The source loaded its engine; sent before `Hello` is answered with `Attached`."""

    manifest: Manifest


class Attached(WireMessage, frozen=True, tag="attached"):
    """The source agreed, mapped the slab, touched every page of it and closed its descriptor."""

    epoch: Count


class Progress(WireMessage, frozen=True, tag="progress"):
    """Cells that the source has written: 1 to MAX_SPANS spans, applied whole or not at all.

    digests: empty, or one per span in the manifest's algorithm over the span's bytes in plan order.
    begun_ns, write_ns, ready_ns: host CLOCK_MONOTONIC of the source: when the compute behind these
    spans began, when their first cells were handed out for writing, and when all of their bytes lay
    in the slot. computed, copied: the same by the source's device, where it has events.
    """

    attempt: AttemptId
    slot: Count
    generation: Count
    spans: Annotated[tuple[Span, ...], Meta(min_length=1, max_length=MAX_SPANS)]
    digests: Annotated[tuple[Count, ...], Meta(max_length=MAX_SPANS)]
    begun_ns: Count
    write_ns: Count
    ready_ns: Count
    computed: DeviceTimes | None = None
    copied: DeviceTimes | None = None


class Computing(WireMessage, frozen=True, tag="computing"):
    """The engine is at work and has nothing to tell yet; holds the progress deadline off."""

    attempt: AttemptId
    slot: Count
    generation: Count


class SourceFinal(WireMessage, frozen=True, tag="final"):
    """The source-final input is there: the logits row in the slot, or a token id.

    begun_ns, ready_ns: host CLOCK_MONOTONIC of the source: when the prefill began, and when the
    source-final input was ready, which may lie before the last cells were written.
    """

    attempt: AttemptId
    slot: Count
    generation: Count
    first: Literal["logits", "token"]
    token: Count
    begun_ns: Count
    ready_ns: Count


class Failed(WireMessage, frozen=True, tag="failed"):
    """The engine failed this attempt; the source lives on."""

    attempt: AttemptId
    slot: Count
    generation: Count
    reason: Text


class Released(WireMessage, frozen=True, tag="released"):
    """The engine has returned and the write lease is back: always an attempt's last message."""

    attempt: AttemptId
    slot: Count
    generation: Count


class Incompatible(WireMessage, frozen=True, tag="incompatible"):
    """The source cannot serve this owner; it exits after saying why.

    shortage: for what the host has too little of just now.
    """

    field: Text
    reason: Text
    shortage: bool = False


ToSource: TypeAlias = Hello | Prefill | Cancel | Shutdown
FromSource: TypeAlias = (
    Ready | Attached | Computing | Progress | SourceFinal | Failed | Released | Incompatible
)
