"""The owner process: the sole owner of one decoder's device, and the parent of its sources.

Started as `python -m headrace.runtime.owner_main --channel FD --config JSON`.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from headrace.backends.base import Decoder, PrefillEngine
from headrace.backends.load import check_name, open_decoder, prefill_engine_of
from headrace.backends.null import decoder_like
from headrace.channel import MAX_MESSAGE_NBYTES, Channel
from headrace.engine.capacity import MORE_MEMORY
from headrace.errors import (
    BackendUnavailable,
    HeadraceError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)
from headrace.messages import (
    MAX_ATTEMPT_TEXT,
    MAX_INTERVALS,
    Down,
    Ended,
    Events,
    FromOwner,
    Inspect,
    Interval,
    Lane,
    Reinstate,
    Shutdown,
    Submit,
    Token,
    ToOwner,
    Up,
    Withdraw,
    decode_to_owner,
    encode,
    travelling_text,
)
from headrace.plan import TOKEN_NBYTES
from headrace.process import die_with_parent, leave_ending_to_parent
from headrace.runtime.config import OwnerConfig, SourceConfig, names_of
from headrace.runtime.control import ControlSocket, answer, inspected
from headrace.runtime.log import configure
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle, close_together

_log = logging.getLogger("headrace.owner")

RouterChannel: TypeAlias = Channel[FromOwner, ToOwner]

CLOGGED_TURN_S = 0.01  # between tries to tell a router something while its channel is full
EVENTS_HEAD_NBYTES = 64  # of a batch of intervals: its tag, its label, its lane, its length


@dataclass(slots=True)
class _Told:
    """A request, and how many of its tokens, or of a drain its intervals, its router was told."""

    request: Request
    count: int = 0


class OwnerProcess:
    """Serves a router's requests on one `DecoderOwner`.

    What a router that does not read is to hear waits in its requests, and in `_outbox` no more than
    one turn's worth: no token is lost, and nobody else's turn is slower for it.
    """

    def __init__(
        self, channel: RouterChannel, owner: DecoderOwner, handles: Sequence[SourceHandle]
    ) -> None:
        """`handles`: the sources that were attached to the owner."""
        self._channel = channel
        self._owner = owner
        self._handles = handles
        self._running: dict[int, _Told] = {}
        self._draining: dict[int, _Told] = {}  # those that are traced
        self._num_asked = 0  # of what is held
        self._outbox: deque[FromOwner] = deque()
        self._shutdown = False

    def serve(self, decoder: Decoder) -> None:
        """Say that all is ready, then serve until `Shutdown` or until the router is gone."""
        caps, handles = decoder.caps, self._handles
        self._owner.watch(self._channel.fileno(), self._receive)
        self._outbox.append(
            Up(
                decoder.manifest(),
                caps.max_lanes,
                sum(handle.num_slots for handle in handles),
                handles[0].slot_nbytes,
                self._owner.context,
                len(handles),
            )
        )
        self._flush()
        self._owner.each_turn(self._report)
        while not self._shutdown:
            self._owner.turn(CLOGGED_TURN_S if self._outbox else 60.0)
        self._flush()

    def _report(self) -> None:
        """Send what waits; and if all of that went out, what there is to say by now."""
        self._flush()
        if self._outbox:
            return
        for label, told in list(self._running.items()):
            self._tell_tokens(label, told)
            if told.request.done:
                del self._running[label]
                self._end(label, told.request)
        for label, told in list(self._draining.items()):
            if told.request.drained:
                del self._draining[label]
                self._tell_intervals(label, "owner", told.request.owner_intervals[told.count :])
                self._outbox.append(Events(label, "owner", ()))  # no more follow
        self._flush()
        while self._num_asked and not self._outbox:
            self._num_asked -= 1
            self._outbox.append(inspected(self._owner))
            self._flush()

    def _receive(self) -> None:
        while not self._shutdown:
            try:
                message, descriptors = self._channel.receive()
            except WouldBlock:
                return
            except RemoteProtocolError as exc:
                _log.error("the router sent what is no message: %s", exc)
                continue
            match message:
                case Submit():
                    self._submit(message, descriptors)
                case Withdraw():
                    if message.label in self._running:
                        self._owner.cancel(self._running[message.label].request)
                case Inspect():
                    self._num_asked += 1
                case Reinstate():
                    self._outbox.append(answer(self._owner, message))
                case Shutdown():
                    self._shutdown = True
                    for told in self._running.values():
                        self._owner.cancel(told.request)  # a prefill of the owner's own ends, too

    def _submit(self, submit: Submit, descriptors: list[int]) -> None:
        label = submit.label
        try:
            tokens = _read_prompt(descriptors, submit.num_tokens)
            request = self._owner.submit(tokens, options_of(submit), label=label)
        except (Refused, RemoteProtocolError) as exc:
            # What came broken is no mistake of whoever asked.
            field = exc.field or "request" if isinstance(exc, Refused) else ""
            reason = travelling_text(str(exc))
            self._outbox.append(Ended(label, "failed", reason, field, None, "", (), "", (), None))
        else:
            self._running[label] = _Told(request)

    def _tell_tokens(self, label: int, told: _Told) -> None:
        """The tokens that were chosen since this was called last."""
        request = told.request
        for at in range(told.count, len(request.tokens)):
            of_it = request.logprobs[at] if request.logprobs else (None, ())
            self._outbox.append(Token(label, request.tokens[at], *of_it))
        told.count = len(request.tokens)

    def _end(self, label: int, request: Request) -> None:
        self._tell_intervals(label, "source", request.source_intervals)
        owners = [each for each in request.owner_intervals if each.kind != "drain"]
        self._tell_intervals(label, "owner", owners)
        if request.options.trace:
            self._draining[label] = _Told(request, len(owners))
        self._outbox.append(
            Ended(
                label,
                request.outcome,  # type: ignore[arg-type]
                travelling_text(request.reason),
                "",
                request.measured,
                request.logits_digest,
                request.kv_digests,
                request.cause,
                tuple(travelling_text(reason)[:MAX_ATTEMPT_TEXT] for reason in request.attempts),
                request.choice,
                request.reuse,
                request.local,
            )
        )

    def _tell_intervals(self, label: int, lane: Lane, intervals: Iterable[Interval]) -> None:
        for batch in batches(intervals):
            self._outbox.append(Events(label, lane, batch))

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._channel.send(self._outbox[0])
            except WouldBlock:
                return
            self._outbox.popleft()


def batches(intervals: Iterable[Interval]) -> Iterator[tuple[Interval, ...]]:
    """The intervals in order, in batches of which each fits a message."""
    batch: list[Interval] = []
    left = room = MAX_MESSAGE_NBYTES - EVENTS_HEAD_NBYTES
    for each in intervals:
        nbytes = len(msgspec.msgpack.encode(each))
        if batch and (nbytes > left or len(batch) == MAX_INTERVALS):
            yield tuple(batch)
            batch, left = [], room
        batch.append(each)
        left -= nbytes
    if batch:
        yield tuple(batch)


def options_of(submit: Submit) -> RequestOptions:
    """The options that a router's message asks for."""
    return RequestOptions(
        route=submit.route,
        group_layers=submit.group_layers,
        chunk=submit.chunk,
        prefill_chunk=submit.prefill_chunk,
        emission=submit.emission,
        max_tokens=submit.max_tokens,
        stop_tokens=submit.stop_tokens,
        sampling=submit.sampling,
        digest=submit.digest,
        audit=submit.audit,
        trace=submit.trace,
        deadline_s=None if submit.deadline_ns is None else submit.deadline_ns / 1e9,
        on_failure=submit.on_failure,
        max_attempts=submit.max_attempts,
        poison=submit.poison,
        prefix=submit.prefix,
        prefill_cuts=submit.prefill_cuts,
        logprobs=submit.logprobs,
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 orderly, 1 refused or failed; the reason was told to the router."""
    die_with_parent()
    leave_ending_to_parent()  # the router cancels in good order
    parser = argparse.ArgumentParser(prog="headrace.runtime.owner_main")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--config", required=True)
    parsed = parser.parse_args(arguments)
    config = msgspec.json.decode(parsed.config, type=OwnerConfig)
    configure(config.log_level, as_json=config.log_json)
    channel: RouterChannel = Channel(socket.socket(fileno=parsed.channel), encode, decode_to_owner)
    with channel:
        try:
            _serve(channel, config)
        except PeerDied as exc:
            if not _tell(channel, Down(False, travelling_text(str(exc)))):
                return 0  # it was the router that died
        except (Refused, BackendUnavailable) as exc:
            shortage = isinstance(exc, Refused) and exc.shortage
            _tell(channel, Down(True, travelling_text(str(exc)), shortage))
        except HeadraceError as exc:
            _tell(channel, Down(False, travelling_text(f"{type(exc).__name__}: {exc}")))
        except MemoryError:
            _tell(channel, Down(False, f"the owner has too little memory. {MORE_MEMORY}"))
        except Exception as exc:
            _log.exception("the owner failed")
            _tell(channel, Down(False, travelling_text(f"{type(exc).__name__}: {exc}")))
        else:
            return 0
    return 1


def _serve(channel: RouterChannel, config: OwnerConfig) -> None:
    names = names_of(config.sources)
    for source in config.sources:
        check_name("source", source.source)
    check_name("decoder", config.decoder)
    with ExitStack() as stack:
        handles: list[SourceHandle] = []
        stack.callback(close_together, handles)
        for source, name in zip(config.sources, names, strict=True):
            handle = _handle_of(config, source, name)
            handles.append(handle)
            with _named(handle, handles):
                handle.start()  # they load while this process loads the decoder
        control = None
        if config.control is not None:
            control = ControlSocket(config.control)
            stack.callback(control.close)
        decoder = _open_decoder(config, handles)
        owner = DecoderOwner(
            decoder,
            context=config.context,
            prefetch_depth=config.prefetch_depth,
            progress_timeout_s=config.progress_timeout_s,
            drain_timeout_s=config.drain_timeout_s,
            local=_own_engine(config, decoder) if config.local else None,
        )
        stack.callback(owner.close)
        for handle in handles:
            with _named(handle, handles):
                owner.attach(handle, restart=config.restart)
        if control is not None:
            control.serve(owner)
        OwnerProcess(channel, owner, handles).serve(decoder)


def _handle_of(config: OwnerConfig, source: SourceConfig, name: str) -> SourceHandle:
    return SourceHandle(
        source.source,
        source.options,
        interpreter=source.python,
        num_slots=source.num_slots,
        start_timeout_s=config.start_timeout_s,
        log_level=config.log_level,
        name=name,
    )


@contextmanager
def _named(handle: SourceHandle, handles: Sequence[SourceHandle]) -> Iterator[None]:
    """Where there are several sources, a refusal says which one it is about."""
    try:
        yield
    except Refused as exc:
        about = f"source {handle.name}"
        if len(handles) == 1 or about in str(exc):
            raise
        raise Refused(f"{about}: {exc}", field=exc.field, shortage=exc.shortage) from exc


def _open_decoder(config: OwnerConfig, handles: Sequence[SourceHandle]) -> Decoder:
    options = dict(config.decoder_options)
    if config.decoder == "null":
        with _named(handles[0], handles):
            options["manifest"] = decoder_like(handles[0].manifest)
    return open_decoder(config.decoder, options)


def _own_engine(config: OwnerConfig, decoder: Decoder) -> PrefillEngine:
    engine = prefill_engine_of(decoder)
    if engine is None:
        raise Refused(
            f"decoder {config.decoder} has no prefill engine of its own, which on_failure local "
            "needs; use fail or retry",
            field="on_failure",
        )
    return engine


def _read_prompt(descriptors: list[int], num_tokens: int) -> array[int]:
    """The prompt's ids from the memfd beside a submit; closes what came."""
    try:
        if len(descriptors) != 1:
            raise RemoteProtocolError(f"a submit with {len(descriptors)} descriptors, expected 1")
        tokens = array("I")
        tokens.frombytes(os.pread(descriptors[0], TOKEN_NBYTES * num_tokens, 0))
        if len(tokens) != num_tokens:
            raise RemoteProtocolError(f"a prompt of {len(tokens)} tokens, {num_tokens} were told")
        return tokens
    except MemoryError as exc:  # before anything of the request was made
        text = f"no memory is left for a prompt of {num_tokens} tokens"
        raise Refused(text, field="decoder") from exc
    finally:
        for fd in descriptors:
            os.close(fd)


def _tell(channel: RouterChannel, message: FromOwner) -> bool:
    try:
        channel.send(message)
    except (PeerDied, WouldBlock):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
