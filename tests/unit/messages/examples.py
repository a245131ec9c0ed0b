"""One message of each kind, by the direction in which it travels, and raw arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from headrace import messages as wire
from headrace.errors import RemoteProtocolError
from headrace.geometry import Full, Latent, Shared, Sliding, State
from headrace.ids import Span
from headrace.messages import (
    Attached,
    Cancel,
    Computing,
    Down,
    Ended,
    Events,
    Failed,
    Hello,
    Incompatible,
    Inspect,
    Inspected,
    Interval,
    LaneHeld,
    Measured,
    Message,
    Prefill,
    Progress,
    Quarantined,
    Ready,
    Reinstate,
    Reinstated,
    Released,
    RequestHeld,
    RouteChoice,
    Sampling,
    Shutdown,
    SlotHeld,
    SourceFinal,
    SourceHeld,
    Submit,
    Token,
    Up,
    Withdraw,
)
from tests.unit.protocol.builders import attempt_id, decoder_manifest, source_manifest

Decode: TypeAlias = Callable[[bytes], Message]

A = attempt_id()
U64 = (1 << 64) - 1
CONTROL_NBYTES = 64 << 10
SPAN = Span(0, 1, 2, 3)
D = decoder_manifest()
SUBMIT = Submit(
    label=1,
    num_tokens=2,
    max_tokens=3,
    route="chunked",
    group_layers=1,
    chunk=0,
    prefill_chunk=0,
    emission="layers",
    digest=False,
    stop_tokens=(1, 2),
    sampling=Sampling(0.5, 0.9, 40, 3),
    audit=True,
    trace=False,
    deadline_ns=9,
    on_failure="retry",
    max_attempts=3,
    poison=False,
    logprobs=20,
)
CHOICE = RouteChoice("streamed", 2, 0, "predicted 1.2 s against 1.4 s whole")
EXAMPLES: dict[Decode, list[Message]] = {
    wire.decode_to_source: [
        Hello(7, D, 64, 2, 8192),
        Prefill(A, 1, 2, 3, "streamed", 4, 5, 6, "cache_groups", True),
        Cancel(A),
        Shutdown(),
    ],
    wire.decode_from_source: [
        Ready(source_manifest(Full(), Sliding(4, 3), Shared("layers.0"), Latent(), State())),
        Attached(7),
        Computing(A, 1, 2),
        Progress(A, 1, 2, (SPAN, Span(1, 2, 2, 3)), (5, U64), 10, 15, 20),
        SourceFinal(A, 1, 2, "token", 3, 10, 20),
        Failed(A, 1, 2, "größer \N{SNOWMAN}"),
        Released(A, 1, 2),
        Incompatible("model", "differs"),
        Incompatible("memory", "too little", shortage=True),
    ],
    wire.decode_to_owner: [
        SUBMIT,
        msgspec.structs.replace(
            SUBMIT, stop_tokens=(), sampling=Sampling(), deadline_ns=None, logprobs=None
        ),
        Withdraw(1),
        Inspect(),
        Reinstate(A, "the device was reset"),
        Shutdown(),
    ],
    wire.decode_from_owner: [
        Up(D, 1, 2, 3, 4, 5),
        Down(True, "no such model"),
        Down(True, "too little memory", shortage=True),
        Token(1, 2),
        Token(1, 2, -0.5, ((2, -0.5), (0, -9999.0))),
        Events(1, "source", (Interval("write", "layer group 0", 1, 2, 3, "host"),)),
        Ended(1, "finished", "", "", Measured(*range(17)), "ab", ("cd", "ef"), "", ("x",), CHOICE),
        Ended(1, "failed", "why", "prompt", None, "", (), "no-source", ("a", "b"), None),
        Inspected(
            (("lanes", "free", 1), ("lanes", "held", -1)),
            (Quarantined(A, "the device failed", 5),),
            64,
            1,
            (LaneHeld(A, "quarantined", "the device failed", 5),),
            (
                SlotHeld(0, 1, 2, "leased", A, ("write", "read 3"), 0),
                SlotHeld(0, 0, 2, "free", None, (), 0),
            ),
            (
                SourceHeld(0, "torch-1", "in service", "", 7, 1),
                SourceHeld(1, "torch-2", "waiting to restart", "it died", 0, 3),
            ),
            (
                RequestHeld(1, A, "streaming", 40, 0, 512, 1024, 9),
                RequestHeld(None, A, "waiting", 40, 0, 0, 0, 9),
            ),
            True,
        ),
        Reinstated(A, "nothing of it is quarantined"),
    ],
}


def raw(message: msgspec.Struct) -> list[Any]:
    """The array that a message is on the wire."""
    out: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return out


def refused(decode: Decode, array: object) -> bool:
    try:
        decode(msgspec.msgpack.encode(array))
    except RemoteProtocolError:
        return True
    return False
