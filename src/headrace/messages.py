"""The only wire format: what an owner, its sources and a router say to each other.

Every message is a msgspec array-like tagged struct that forbids unknown fields, encoded as msgpack.
Any bytes decode to one message of the expected direction or raise `RemoteProtocolError`. Messages
carry no payload: KV, prompts and logits live in a slot (or, from the router, in a memfd passed
beside the message), so that a message stays under 64 KiB whatever the size of the request.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from headrace.errors import RemoteProtocolError
from headrace.geometry import Emission, Manifest
from headrace.ids import AttemptId, Span

T = TypeVar("T")

MAX_SPANS: Final = 64
MAX_PROGRESS: Final = 128
MAX_TEXT: Final = 4096
MAX_INTERVALS: Final = 256
MAX_STOP_TOKENS: Final = 256
MAX_CUTS: Final = 64
MAX_ATTEMPTS: Final = 16
MAX_CHOICE_TEXT: Final = 400
MAX_ATTEMPT_TEXT: Final = 400  # of each failed attempt's reason, so that an end fits its message

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Route: TypeAlias = Literal["whole", "chunked", "streamed"]
AskedRoute: TypeAlias = Literal["whole", "chunked", "streamed", "auto"]
Lane: TypeAlias = Literal["source", "owner"]
OnFailure: TypeAlias = Literal["fail", "retry", "local"]
PrefixAsked: TypeAlias = Literal["off", "identical", "shared"]
Remainder: TypeAlias = Literal["none", "source", "owner"]


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    pass


class DeviceTimes(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """When a device did something, by its own events, brought to the host's CLOCK_MONOTONIC in ns.

    error_ns: by how much the two readings may be off, since the clocks were compared from outside.
    kind: `fake` where the device is a model of one, of whose times nothing may be claimed.
    """

    begun_ns: Count
    ended_ns: Count
    error_ns: Count
    kind: Literal["real", "fake"] = "real"


# Owner to source.


class Hello(_Message, frozen=True, tag="hello"):
    """The first message: what the source must agree with; the slab's descriptor rides beside it."""

    epoch: Count
    decoder: Manifest
    context: Count
    num_slots: Count
    slot_nbytes: Count


class Prefill(_Message, frozen=True, tag="prefill"):
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


class Cancel(_Message, frozen=True, tag="cancel"):
    """The attempt is no longer wanted; the source stops at its next sink call."""

    attempt: AttemptId


class Shutdown(_Message, frozen=True, tag="shutdown"):
    """Finish nothing new and exit."""


# Source to owner.


class Ready(_Message, frozen=True, tag="ready"):
    """The source loaded its engine; sent before `Hello` is answered with `Attached`."""

    manifest: Manifest


class Attached(_Message, frozen=True, tag="attached"):
    """The source agreed, mapped the slab, touched every page of it and closed its descriptor."""

    epoch: Count


class Progress(_Message, frozen=True, tag="progress"):
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


class Computing(_Message, frozen=True, tag="computing"):
    """The engine is at work and has nothing to tell yet; holds the progress deadline off."""

    attempt: AttemptId
    slot: Count
    generation: Count


class SourceFinal(_Message, frozen=True, tag="final"):
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


class Failed(_Message, frozen=True, tag="failed"):
    """The engine failed this attempt; the source lives on."""

    attempt: AttemptId
    slot: Count
    generation: Count
    reason: Text


class Released(_Message, frozen=True, tag="released"):
    """The engine has returned and the write lease is back: always an attempt's last message."""

    attempt: AttemptId
    slot: Count
    generation: Count


class Incompatible(_Message, frozen=True, tag="incompatible"):
    """The source cannot serve this owner; it exits after saying why."""

    field: Text
    reason: Text


ToSource: TypeAlias = Hello | Prefill | Cancel | Shutdown
FromSource: TypeAlias = (
    Ready | Attached | Computing | Progress | SourceFinal | Failed | Released | Incompatible
)


# Router to owner.


class Sampling(_Message, frozen=True, tag="sampling"):
    """How tokens are chosen: temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: Count = 0
    seed: Count | None = None


class Submit(_Message, frozen=True, tag="submit"):
    """Start a request; its u32 prompt ids ride beside it as a memfd of 4 x num_tokens bytes."""

    label: Count
    num_tokens: Count
    max_tokens: Count
    route: AskedRoute
    group_layers: Count
    chunk: Count
    prefill_chunk: Count
    emission: Emission
    digest: bool
    stop_tokens: Annotated[tuple[Count, ...], Meta(max_length=MAX_STOP_TOKENS)]
    sampling: Sampling
    audit: bool
    trace: bool
    deadline_ns: Count | None
    on_failure: OnFailure
    max_attempts: Count
    poison: bool
    prefix: PrefixAsked = "off"
    prefill_cuts: Annotated[tuple[Count, ...], Meta(max_length=MAX_CUTS)] = ()


class Withdraw(_Message, frozen=True, tag="withdraw"):
    """Cancel the request with this label, wherever it is."""

    label: Count


class Inspect(_Message, frozen=True, tag="inspect"):
    """Tell what is held; answered by `Inspected`."""


class Reinstate(_Message, frozen=True, tag="reinstate"):
    """An operator answers for it that the device is quiet; answered by `Reinstated`.

    because: how the operator knows, for the log.
    """

    attempt: AttemptId
    because: Text


# Owner to router.


class Up(_Message, frozen=True, tag="up"):
    """The owner and all its sources are ready."""

    decoder: Manifest
    lanes: Count
    num_slots: Count
    slot_nbytes: Count
    context: Count


class Down(_Message, frozen=True, tag="down"):
    """The owner cannot start or go on; `mistake` tells a user's mistake from a failure."""

    mistake: bool
    reason: Text


class Token(_Message, frozen=True, tag="token"):
    """One more token of a request."""

    label: Count
    token: Count


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


class Interval(_Message, frozen=True, tag="interval"):
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


class Events(_Message, frozen=True, tag="events"):
    """A batch of a request's intervals on one lane, sent before `Ended`.

    More of the owner's follow on `Ended` until the request's storage is free; the last is empty.
    """

    label: Count
    lane: Lane
    intervals: Annotated[tuple[Interval, ...], Meta(max_length=MAX_INTERVALS)]


class Measured(_Message, frozen=True, tag="measured"):
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


class RouteChoice(_Message, frozen=True, tag="choice"):
    """The route that `auto` took for a request, how it is cut, and why."""

    route: Route
    group_layers: Count
    chunk: Count
    reason: Annotated[str, Meta(max_length=MAX_CHOICE_TEXT)]


class Reuse(_Message, frozen=True, tag="reuse"):
    """What of a prompt was not prefilled, since the decoder had kept it, and why so much.

    positions: the first ones. remainder: who computed the others; none if there were none.
    """

    positions: Count
    remainder: Remainder
    reason: Annotated[str, Meta(max_length=MAX_CHOICE_TEXT)]


class Ended(_Message, frozen=True, tag="ended"):
    """The request's one terminal; `mistake` names the option if it was refused as asked.

    Digests are hex, empty unless asked for by `audit`: of every logits row in order, and per layer
    of the published cells. cause: why it was not published, as a word, or empty. attempts: the
    reasons of the attempts that others followed. choice: what route `auto` came to. reuse: what a
    request that asked for it got of kept prompts.
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


class Quarantined(_Message, frozen=True, tag="apart"):
    """What an attempt left out of service, why, and for how long by now."""

    attempt: AttemptId
    reason: Text
    for_ns: Count


class Inspected(_Message, frozen=True, tag="inspected"):
    """What an owner holds: counts, what is out of service, and each lane and slot as a line.

    statistics: (section, name, count). What does not fit into one message is left out, lines first.
    """

    statistics: tuple[tuple[Text, Text, int], ...]
    quarantined: tuple[Quarantined, ...]
    lines: tuple[Text, ...]


class Reinstated(_Message, frozen=True, tag="reinstated"):
    """What was quarantined is in service again, or is not: then `error` says why."""

    attempt: AttemptId
    error: Text


ToOwner: TypeAlias = Submit | Withdraw | Inspect | Reinstate | Shutdown
FromOwner: TypeAlias = Up | Down | Token | Events | Ended | Inspected | Reinstated

Message: TypeAlias = ToSource | FromSource | ToOwner | FromOwner

_encoder = msgspec.msgpack.Encoder()
_to_source = msgspec.msgpack.Decoder(ToSource)
_from_source = msgspec.msgpack.Decoder(FromSource)
_to_owner = msgspec.msgpack.Decoder(ToOwner)
_from_owner = msgspec.msgpack.Decoder(FromOwner)


def travelling_text(text: str) -> str:
    """`text` as a message can carry it: at most MAX_TEXT characters, each of them encodable.

    An exception's text may hold lone surrogates (`os.fsdecode`), which no UTF-8 string has.
    """
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_to_source(payload: bytes) -> ToSource:
    """A message from the owner; raises RemoteProtocolError for anything else."""
    return _decode(_to_source, payload)


def decode_from_source(payload: bytes) -> FromSource:
    """A message from a source; raises RemoteProtocolError for anything else."""
    return _decode(_from_source, payload)


def decode_to_owner(payload: bytes) -> ToOwner:
    """A message from the router; raises RemoteProtocolError for anything else."""
    return _decode(_to_owner, payload)


def decode_from_owner(payload: bytes) -> FromOwner:
    """A message from an owner; raises RemoteProtocolError for anything else."""
    return _decode(_from_owner, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"undecodable message of {len(payload)} bytes: {exc}") from exc
