"""Engines that break the protocol, or die, as the first token of a prompt tells them.

They reach under the sink for the real channel, as a buggy engine's stray code might; what they send
is what no correct source can send. Prompts that begin with an unknown token are served well.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec

import headrace.protocol.source
from headrace.backends.base import PrefillSink
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.errors import Cancelled, LocalProtocolError, Unquiet
from headrace.geometry import Manifest
from headrace.ids import AttemptId, Span
from headrace.messages import (
    Attached,
    Failed,
    FromSource,
    Incompatible,
    Progress,
    Ready,
    Released,
    SourceFinal,
    Token,
    encode,
)
from headrace.runtime.sink import SlotSink
from headrace.testing.malformed import Case, cases

Behaviour = Callable[["Rogue"], None]


def open_rogue(options: Mapping[str, Any]) -> RogueEngine:
    """A replay engine that misbehaves when asked; only one behaviour waits at the `gate`."""
    rest = {key: value for key, value in options.items() if key != "gate"}
    return RogueEngine(open_replay(rest), options["gate"])


class RogueEngine:
    def __init__(self, engine: ReplayEngine, gate: str) -> None:
        self._engine = engine
        self._gate = gate

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        rogue = Rogue(self._engine, cast(SlotSink, sink), tokens, self._gate)
        name = BY_TOKEN.get(tokens[0])
        if name is None:
            rogue.behave()
        else:
            BEHAVIOURS[name](rogue)

    def close(self) -> None:
        self._engine.close()


class Rogue:
    """One attempt that may go wrong."""

    def __init__(
        self, engine: ReplayEngine, sink: SlotSink, tokens: Sequence[int], gate: str
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._tokens = tokens
        self.sink = sink
        self.prefill = sink.options
        self.identity = (self.prefill.attempt, self.prefill.slot, self.prefill.generation)
        # The sink's `send` and `poll` are bound methods of the channel and of the source process.
        self.channel = cast(Any, sink._send).__self__
        self.process = cast(Any, sink._poll).__self__

    def behave(self) -> None:
        self._engine.prefill_stream(self._tokens, self.sink)

    def wait_at_gate(self) -> None:
        with open(self._gate, "rb", buffering=0) as gate:
            gate.read(1)

    def raw_for_sure(self, payload: bytes) -> None:
        """Send a packet; if the channel is full, as soon as there is room."""
        writable = select.poll()
        writable.register(self.channel.fileno(), select.POLLOUT)
        writable.poll()
        self.channel._sock.send(payload)

    def raw(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self.channel._sock, [payload], list(fds))

    def send(self, message: Any) -> None:
        self.raw(encode(message))

    def progress(self, *spans: tuple[int, int, int, int], **changes: Any) -> Progress:
        attempt, slot, generation = self.identity
        facts: dict[str, Any] = {
            "attempt": attempt,
            "slot": slot,
            "generation": generation,
            "spans": tuple(Span(*span) for span in spans),
            "digests": (),
            "begun_ns": 0,
            "write_ns": 0,
            "ready_ns": time.monotonic_ns(),
        }
        return Progress(**facts | changes)

    def final(self, first: str = "logits", token: int = 0, **changes: Any) -> SourceFinal:
        attempt, slot, generation = self.identity
        facts: dict[str, Any] = {
            "attempt": attempt,
            "slot": slot,
            "generation": generation,
            "first": first,
            "token": token,
            "begun_ns": 0,
            "ready_ns": time.monotonic_ns(),
        }
        return SourceFinal(**facts | changes)

    @property
    def everything(self) -> tuple[int, int, int, int]:
        return (0, len(self.sink.plan.layers), 0, self.sink.plan.num_tokens)


def _twice(rogue: Rogue) -> None:
    rogue.send(rogue.progress((0, 1, 0, 40)))
    rogue.send(rogue.progress((0, 1, 39, 40)))


def _late_write(rogue: Rogue) -> None:
    """Write over the cells between the stamp and the message: only a digest can tell."""
    layers = range(len(rogue.sink.plan.layers))
    writer = rogue.sink.write(rogue.sink.plan.whole())
    places = [cells for layer in layers for cells in writer.cells(layer)]
    send = rogue.sink._send

    def scribble_and_send(message: FromSource) -> None:
        for cells in places:
            for row in cells.rows():
                row[:] = b"\x7e" * len(row)
        send(message)

    rogue.sink._send = scribble_and_send
    writer.commit()
    rogue.sink.final(bytes(rogue.sink.plan.slot.logits_nbytes))


def _hang_up(rogue: Rogue) -> None:
    rogue.channel._sock.shutdown(socket.SHUT_RDWR)
    rogue.channel._sock.close()
    signal.pause()


def _deaf(rogue: Rogue) -> None:
    """Go on after a cancel."""
    rogue.sink._poll = lambda: None
    rogue.behave()


def _die_after_final(rogue: Rogue) -> None:
    rogue.behave()
    os._exit(3)


def _run_on(rogue: Rogue) -> None:
    """Give the lease back and compute on, deaf to every error of the sink."""
    rogue.send(Released(*rogue.identity))
    readable = select.poll()
    readable.register(rogue.channel.fileno(), select.POLLIN)
    while True:
        readable.poll()
        with suppress(Cancelled, LocalProtocolError):
            rogue.sink.check()


def _nan(rogue: Rogue) -> None:
    with rogue.sink.write(rogue.sink.plan.whole()):
        pass
    rogue.sink.final(b"\xff" * rogue.sink.plan.slot.logits_nbytes)


def _stays_unquiet(rogue: Rogue) -> None:
    with rogue.sink.write(Span(0, 2, 0, 40)):
        pass
    raise Unquiet("copies into it may be in flight: the device went up in smoke")


def _raise(rogue: Rogue) -> None:
    with rogue.sink.write(Span(0, 2, 0, 40)):
        pass
    raise ValueError("layer 2 went up in smoke")


def _rewrites(rogue: Rogue) -> None:
    """Ask for told cells, swallow the error, and give a final as if nothing were wrong."""
    with rogue.sink.write(rogue.sink.plan.whole()):
        pass
    with suppress(LocalProtocolError):
        rogue.sink.write(rogue.sink.plan.whole())
    rogue.sink.final(bytes(rogue.sink.plan.slot.logits_nbytes))


def _commits_twice(rogue: Rogue) -> None:
    """Two writers of the same cells; every error is swallowed, that of the final as well."""
    writers = [rogue.sink.write(rogue.sink.plan.whole()) for _ in range(2)]
    for writer in writers:
        with suppress(LocalProtocolError):
            writer.commit()
    with suppress(LocalProtocolError):
        rogue.sink.final(bytes(rogue.sink.plan.slot.logits_nbytes))


def _flood(rogue: Rogue) -> None:
    """Tell the owner old news as fast as it reads, until the cancel."""
    epoch, counter, number = rogue.identity[0]
    news = encode(rogue.progress((0, 1, 0, 1), attempt=AttemptId(epoch, counter + 100, number)))
    while True:
        rogue.sink.check()
        with suppress(BlockingIOError):
            rogue.raw(news)


def _stray_slot(rogue: Rogue) -> None:
    rogue.send(rogue.progress((0, 1, 0, 40), slot=rogue.prefill.slot + 1))


def _with_descriptors(rogue: Rogue) -> None:
    fd = os.memfd_create("stray")
    rogue.raw(encode(rogue.progress((0, 1, 0, 40))), [fd, fd])
    os.close(fd)


def _stale(rogue: Rogue) -> None:
    """Messages of attempts that are not there: dropped, and this attempt is none the worse."""
    epoch, counter, number = rogue.identity[0]
    for attempt in (
        AttemptId(epoch, counter, number + 1),
        AttemptId(epoch, counter + 100, 1),
        AttemptId(epoch + 1, counter, number),
    ):
        rogue.send(rogue.progress((0, 1, 0, 1), attempt=attempt))
        rogue.send(Released(attempt, *rogue.identity[1:]))
        rogue.send(Failed(attempt, *rogue.identity[1:], "not mine"))
        rogue.send(rogue.final(attempt=attempt))
    rogue.behave()


def _handshake_again(rogue: Rogue) -> None:
    rogue.send(Ready(rogue._engine.manifest()))
    rogue.send(Attached(0))
    rogue.send(Incompatible("x", "y"))
    rogue.behave()


def _after_final(rogue: Rogue) -> None:
    """What comes once the entry is published changes nothing."""
    rogue.behave()
    rogue.wait_at_gate()
    for message in (
        rogue.progress((0, 1, 0, 1)),
        rogue.final(),
        Failed(*rogue.identity, "too late"),
    ):
        rogue.send(message)


def _a_token(rogue: Rogue) -> None:
    rogue.send(rogue.progress(rogue.everything))
    rogue.send(rogue.final("token", 3))


def _empty(rogue: Rogue) -> None:
    rogue.channel._sock.send(b"")


DIGIT = 1000  # of what a prompt's tokens say


def case_prompt(name: str, counters_back: int, slot: int, generation: int) -> list[int]:
    """The tokens that order a case of `headrace.testing.malformed` by its name.

    A neighbour is held by another source: its request was submitted `counters_back` requests before
    this one, and has this slot and generation.
    """
    number = zlib.crc32(name.encode())
    digits = [number // DIGIT**at % DIGIT for at in range(4)]
    return [TOKEN_OF["a case"], counters_back, slot, generation, *digits]


def _case(rogue: Rogue) -> None:
    """Send a case, say so, and prefill as ever if that does not end the attempt."""
    _, back, slot, generation, *digits = rogue._tokens[:8]
    epoch, counter, _ = rogue.identity[0]
    neighbour = (AttemptId(epoch, counter - back, 1), slot, generation)
    number = sum(digit * DIGIT**at for at, digit in enumerate(digits))
    case = _case_of(rogue, number, neighbour)
    if case.completes:
        rogue.sink._send = lambda message: None  # the packets of the case tell it
        rogue.behave()
    for payload in case.payloads:
        rogue.raw_for_sure(payload)
    with open(f"{rogue._gate}.told", "wb", buffering=0) as told:
        told.write(b".")
    while case.kind == "corrupt":
        rogue.sink.check()  # until it is cancelled
    if case.verdict != "fails" and not case.completes:
        rogue.behave()


def _case_of(rogue: Rogue, number: int, neighbour: tuple[AttemptId, int, int]) -> Case:
    for case in cases(rogue.sink.plan, rogue.prefill, others=[neighbour]):
        if zlib.crc32(case.name.encode()) == number:
            return case
    raise LookupError(f"there is no case {number:#x}")


def _wild_clock(rogue: Rogue) -> None:
    """Serve well, by a clock that runs from the end of time to its beginning."""
    send = rogue.sink._send

    def send_wildly(message: FromSource) -> None:
        if isinstance(message, Progress | SourceFinal):
            message = msgspec.structs.replace(message, begun_ns=2**64 - 1, ready_ns=0)
        send(message)

    rogue.sink._send = send_wildly
    rogue.behave()


BEHAVIOURS: dict[str, Behaviour] = {
    "cell twice": _twice,
    "layer outside": lambda r: r.send(r.progress((0, 99, 0, 40))),
    "layers far outside": lambda r: r.send(r.progress((2**62, 2**63 - 1, 0, 40))),
    "position outside": lambda r: r.send(r.progress((0, 1, 0, 41))),
    "negative position": lambda r: r.send(r.progress((0, 1, -5, 10))),
    "empty span": lambda r: r.send(r.progress((0, 1, 5, 5))),
    "reversed span": lambda r: r.send(r.progress((3, 1, 0, 40))),
    "stray slot": _stray_slot,
    "unknown slot": lambda r: r.send(r.progress((0, 1, 0, 40), slot=2**40)),
    "old generation": lambda r: r.send(r.progress((0, 1, 0, 40), generation=2**40)),
    "digests amiss": lambda r: r.send(r.progress((0, 1, 0, 40), digests=(1, 2))),
    "final without cells": lambda r: r.send(r.final()),
    "a token instead": _a_token,
    "an unknown token": lambda r: r.send(r.final("token", 2**40)),
    "no final": lambda r: None,
    "released early": lambda r: r.send(Released(*r.identity)),
    "garbage": lambda r: r.raw(b"\xc1garbage"),
    "an empty packet": _empty,
    "a packet too long": lambda r: r.raw(bytes(66_000)),
    "no array": lambda r: r.raw(msgspec.msgpack.encode({"t": "progress"})),
    "unknown tag": lambda r: r.raw(msgspec.msgpack.encode(["explode", 1])),
    "an owner's message": lambda r: r.send(Token(1, 2)),
    "descriptors": _with_descriptors,
    "raises": _raise,
    "stays unquiet": _stays_unquiet,
    "nan": _nan,
    "late write": _late_write,
    "writes told cells": _rewrites,
    "commits twice": _commits_twice,
    "floods": _flood,
    # Those below do no harm to their attempt.
    "stale": _stale,
    "handshake again": _handshake_again,
    "after the final": _after_final,
    "wild clock": _wild_clock,
    # That which its other tokens name.
    "a case": _case,
    # Those below end the source.
    "exits": lambda r: os._exit(3),
    "aborts": lambda r: os.abort(),
    "hangs up": _hang_up,
    "dies after the final": _die_after_final,
    "deaf": _deaf,
    # That which ends it once the next attempt is granted.
    "runs on": _run_on,
}
TOKEN_OF = {name: 1000 + at for at, name in enumerate(BEHAVIOURS)}
BY_TOKEN = {token: name for name, token in TOKEN_OF.items()}


def open_paced(options: Mapping[str, Any]) -> ReplayEngine:
    """The replay engine, with no gate to wait at."""
    return open_replay({key: value for key, value in options.items() if key != "gate"})


def open_chatty(options: Mapping[str, Any]) -> ReplayEngine:
    """The same, in a source that says every 50 ms that it is at work."""
    headrace.protocol.source.HEARTBEAT_NS = 50_000_000
    return open_paced(options)


def open_dying(options: Mapping[str, Any]) -> RogueEngine:
    """Dies while it loads, without a word."""
    os._exit(9)
