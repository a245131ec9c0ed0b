"""The source process: one engine, one slab, one channel to its owner, one thread.

Started as `INTERPRETER -m headrace.runtime.source_main --channel FD --engine NAME --options JSON`.
Needs msgspec and the engine's own packages only.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from headrace.backends.base import HostRange, PinsSlabs, PrefillEngine
from headrace.backends.load import open_source
from headrace.channel import Channel
from headrace.engine.capacity import MORE_MEMORY
from headrace.errors import HeadraceError, PeerDied, Refused, Unquiet, WouldBlock
from headrace.geometry import Layout, agree
from headrace.memory import Slab
from headrace.messages import (
    Attached,
    Cancel,
    FromSource,
    Hello,
    Incompatible,
    Prefill,
    Ready,
    Shutdown,
    ToSource,
    decode_to_source,
    encode,
    travelling_text,
)
from headrace.plan import Plan, compile_plan, slot_layout
from headrace.process import die_with_parent, leave_ending_to_parent
from headrace.protocol.source import SourceAttempt
from headrace.runtime.attempt import run_attempt
from headrace.runtime.sink import SlotSink

SourceChannel = Channel[FromSource, ToSource]

UNQUIET_STATUS = 70
"""Exit status of a source whose slots only its end proves quiet: a lease was given back while its
engine computes on, or cannot be, since a device may write on.
"""


class SourceProcess:
    """Serves prefills, one at a time, until its owner is gone or says so."""

    def __init__(self, channel: SourceChannel, engine: PrefillEngine) -> None:
        self._channel = channel
        self._engine = engine
        self._shutdown = False
        self._attempt: SourceAttempt | None = None

    def serve(self) -> None:
        """Shake hands, then serve; returns at `Shutdown`. Raises PeerDied if the owner is gone."""
        manifest = self._engine.manifest()
        self._channel.send(Ready(manifest))
        hello, descriptors = self._next()
        if isinstance(hello, Shutdown):
            return
        if not isinstance(hello, Hello) or len(descriptors) != 1:
            raise Refused("the owner did not begin with a hello and one descriptor")
        layout = agree(manifest, hello.decoder)
        expected = slot_layout(hello.decoder, hello.context).nbytes
        if hello.slot_nbytes != expected:
            raise Refused(f"slots of {hello.slot_nbytes} bytes, the plan has {expected}")
        slab = Slab.attach(descriptors[0], hello.num_slots * hello.slot_nbytes)
        try:
            with _pinned(self._engine, slab):
                self._channel.send(Attached(hello.epoch))
                self._serve_prefills(hello, layout, slab)
        finally:
            slab.close()

    def _serve_prefills(self, hello: Hello, layout: Layout, slab: Slab) -> None:
        while not self._shutdown:
            message, _ = self._next()
            if isinstance(message, Prefill):
                plan = compile_plan(
                    hello.decoder, layout, message.num_tokens, hello.context, message.start
                )
                if message.slot >= hello.num_slots:
                    raise Refused(f"slot {message.slot} of {hello.num_slots}")
                begin = message.slot * hello.slot_nbytes
                self._prefill(message, plan, slab.view[begin : begin + hello.slot_nbytes])
            elif isinstance(message, Shutdown):
                self._shutdown = True

    def _prefill(self, prefill: Prefill, plan: Plan, slot: memoryview) -> None:
        attempt = self._attempt = SourceAttempt(prefill, plan)
        sink = SlotSink(attempt, slot, self._channel.send, self._poll)
        try:
            last = run_attempt(self._engine, attempt, sink, slot)
        except Unquiet as exc:
            for failed in attempt.fail(f"{type(exc).__name__}: {exc}"):
                self._send_for_sure(failed)
            _end_unquiet(f"the slot of attempt {prefill.attempt} is not given back: {exc}")
        self._attempt = None
        for message in last:
            self._send_for_sure(message)

    def _send_for_sure(self, message: FromSource) -> None:
        """Send what ends an attempt; the engine has returned, so waiting blocks none."""
        writable = select.poll()
        writable.register(self._channel.fileno(), select.POLLOUT)
        while True:
            try:
                self._channel.send(message)
            except WouldBlock:
                writable.poll()
            else:
                return

    def _poll(self) -> None:
        """Take in what came while an engine runs: a cancel of its attempt, or the end.

        A grant comes here only if stray code gave the lease back and the engine computes on, who
        knows where to. Its owner takes the slot for quiet, which only this process's end makes
        true; and that must not depend on an engine, which may swallow what is raised.
        """
        while True:
            try:
                message, _ = self._channel.receive()
            except WouldBlock:
                return
            attempt = self._attempt
            if isinstance(message, Prefill):
                _end_unquiet(_given_back_early(message, attempt))
            if isinstance(message, Shutdown):
                self._shutdown = True
            withdrawn = isinstance(message, Cancel) and (
                attempt is not None and message.attempt == attempt.prefill.attempt
            )
            if attempt is not None and (withdrawn or self._shutdown):
                attempt.cancel()

    def _next(self) -> tuple[ToSource, list[int]]:
        while True:
            try:
                return self._channel.receive()
            except WouldBlock:
                self._channel.wait_readable(3600.0)


@contextmanager
def _pinned(engine: PrefillEngine, slab: Slab) -> Iterator[None]:
    """The engine's device is told of the slab as long as it is mapped, if it wants to be."""
    if not isinstance(engine, PinsSlabs):
        yield
        return
    mapped = HostRange(slab.address, slab.nbytes)
    engine.register(mapped)
    try:
        yield
    finally:
        engine.unregister(mapped)


def _given_back_early(granted: Prefill, running: SourceAttempt | None) -> str:
    engine = "an engine" if running is None else f"the engine of attempt {running.prefill.attempt}"
    return (
        f"attempt {granted.attempt} was granted while {engine} still computes: its lease was given "
        "back too early"
    )


def _end_unquiet(why: str) -> NoReturn:
    """End as no engine and no device can prevent: it proves all slots quiet."""
    try:
        os.write(2, f"headrace: {why}, and this process ends\n".encode())
    finally:
        os._exit(UNQUIET_STATUS)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 orderly, 1 refused or failed; the reason was told to the owner.

    UNQUIET_STATUS: see there; the reason is on standard error.
    """
    die_with_parent()
    leave_ending_to_parent()
    parser = argparse.ArgumentParser(prog="headrace.runtime.source_main")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--log-level", default="WARNING")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=parsed.log_level.upper(), format="%(name)s: %(message)s")
    sock = socket.socket(fileno=parsed.channel)
    os.set_inheritable(sock.fileno(), False)
    channel: SourceChannel = Channel(sock, encode, decode_to_source)
    with channel:
        try:
            return _serve(channel, parsed.engine, msgspec.json.decode(parsed.options))
        except PeerDied:
            return 0  # the owner is gone, and with it the reason to live
        except Refused as exc:
            field, reason = travelling_text(exc.field), travelling_text(str(exc))
            channel.send(Incompatible(field, reason, exc.shortage))
        except HeadraceError as exc:
            channel.send(Incompatible(type(exc).__name__, travelling_text(str(exc))))
        except MemoryError:
            text = f"too little memory. {MORE_MEMORY}"
            channel.send(Incompatible("memory", text, shortage=True))
        except Exception as exc:
            traceback.print_exc()
            channel.send(Incompatible("engine", travelling_text(f"{type(exc).__name__}: {exc}")))
    return 1


def _serve(channel: SourceChannel, name: str, options: dict[str, Any]) -> int:
    engine = open_source(name, options)
    try:
        SourceProcess(channel, engine).serve()
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
