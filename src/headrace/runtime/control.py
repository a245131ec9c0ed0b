"""What an operator asks of an owner that runs, and the socket through which it is asked.

An owner whose config names a control path listens there, on an AF_UNIX SEQPACKET socket whose file
only its own user may open. It takes two messages: `Inspect`, and `Reinstate` for what is in
quarantine. Both are answered in the owner's turns, so an answer waits for a decode step at most.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import time
from pathlib import Path

from msgspec.structs import replace

from headrace.channel import MAX_MESSAGE_NBYTES, Channel
from headrace.errors import (
    HeadraceError,
    LocalProtocolError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)
from headrace.messages import (
    MAX_HELD_TEXT,
    FromOwner,
    Inspect,
    Inspected,
    LaneHeld,
    Quarantined,
    Reinstate,
    Reinstated,
    SlotHeld,
    ToOwner,
    decode_from_owner,
    decode_to_owner,
    encode,
    travelling_text,
)
from headrace.protocol.snapshot import LaneLine, SlotLine
from headrace.runtime.owner import DecoderOwner

MAX_OPERATORS = 8  # connections at once; one more closes the oldest
ANSWER_TIMEOUT_S = 60.0
LISTEN_AGAIN_S = 1.0  # after a connection that could not be taken, as when no descriptor is left

_MAX_PATH_NBYTES = 107  # what an AF_UNIX address holds
_LEFT_OUT = ("requests", "slots", "lanes", "quarantined", "statistics", "sources")
_log = logging.getLogger("headrace.owner")


class NoAnswer(HeadraceError):
    """An owner did not answer an operator in time."""


def answer(owner: DecoderOwner, message: Inspect | Reinstate) -> Inspected | Reinstated:
    """Do what an operator asks, and say what came of it.

    Raises:
        LocalProtocolError: the owner itself is at fault, which is no answer to an operator.
    """
    if isinstance(message, Inspect):
        return inspected(owner)
    try:
        owner.reinstate(message.attempt)
    except LocalProtocolError:
        raise
    except HeadraceError as exc:
        return Reinstated(message.attempt, travelling_text(str(exc)))
    _log.warning("%s was reinstated by an operator: %s", message.attempt, message.because)
    return Reinstated(message.attempt, "")


def inspected(owner: DecoderOwner) -> Inspected:
    """What an owner holds, as much of it as one message carries."""
    now_ns = time.monotonic_ns()
    snapshot = owner.snapshot()
    report = Inspected(
        tuple(
            (travelling_text(section), travelling_text(name), count)
            for section, counts in owner.statistics().items()
            for name, count in counts.items()
        ),
        tuple(
            Quarantined(attempt, travelling_text(apart.reason), max(0, now_ns - apart.since_ns))
            for attempt, apart in owner.quarantined().items()
        ),
        owner.context,
        snapshot.lanes_free,
        tuple(_lane_held(lane, now_ns) for lane in snapshot.lanes),
        tuple(_slot_held(slot, now_ns) for slot in snapshot.slots),
        tuple(owner.sources_held()),
        tuple(owner.requests_held()),
    )
    while len(encode(report)) > MAX_MESSAGE_NBYTES:
        report = _halved(report)
    return report


def _halved(report: Inspected) -> Inspected:
    """With half of what is missed least; all that there is to leave out is left out in the end."""
    for name in _LEFT_OUT:
        held = getattr(report, name)
        if held:
            return replace(report, truncated=True, **{name: held[: len(held) // 2]})
    raise LocalProtocolError("what an owner holds does not fit a message whatever is left out")


def _lane_held(lane: LaneLine, now_ns: int) -> LaneHeld:
    reason = travelling_text(lane.reason)[:MAX_HELD_TEXT]
    return LaneHeld(lane.attempt, lane.state, reason, _for_ns(lane.since_ns, now_ns))


def _slot_held(slot: SlotLine, now_ns: int) -> SlotHeld:
    return SlotHeld(
        slot.source,
        slot.slot,
        slot.generation,
        slot.state,
        slot.holder,
        slot.tokens,
        _for_ns(slot.since_ns, now_ns),
    )


def _for_ns(since_ns: int, now_ns: int) -> int:
    return max(0, now_ns - since_ns) if since_ns else 0


class ControlSocket:
    """The socket at a control path. Whoever asks before there is an owner waits for it."""

    def __init__(self, path: str) -> None:
        """Listen at `path`; the socket of an owner that is dead is replaced.

        Raises:
            Refused: the path is too long, cannot be made, or is somebody else's.
        """
        self._path = Path(path)
        self._owner: DecoderOwner | None = None
        self._open: list[Channel[FromOwner, ToOwner]] = []
        self._sock: socket.socket | None = _listen(self._path)
        self._file = os.lstat(self._path)
        self._deaf_until_ns: int | None = None  # set while it listens to nobody new
        self._told = False  # that it was so, since the last connection
        self._closed = False

    def serve(self, owner: DecoderOwner) -> None:
        """Answer for `owner` in its turns, until it is closed; call it once."""
        self._owner = owner
        self._listen()
        owner.each_turn(self._listen_again)

    def close(self) -> None:
        """End it and remove the file, if it is still this one's. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop()
        for channel in list(self._open):
            self._hang_up(channel)
        try:
            if os.path.samestat(os.lstat(self._path), self._file):
                os.unlink(self._path)
        except OSError as exc:
            _log.warning("the control socket %s was not removed: %s", self._path, exc.strerror)

    def _stop(self) -> None:
        if self._sock is not None:
            self._unwatch(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _unwatch(self, fd: int) -> None:
        if self._owner is not None and not self._owner.closed:
            self._owner.unwatch(fd)

    def _listen(self) -> None:
        owner, self._deaf_until_ns = self._owner, None
        if owner is not None and self._sock is not None:
            owner.watch(self._sock.fileno(), lambda: self._accept(owner))

    def _listen_again(self) -> None:
        if self._deaf_until_ns is not None and self._deaf_until_ns <= time.monotonic_ns():
            self._listen()

    def _accept(self, owner: DecoderOwner) -> None:
        if self._sock is None:
            return
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as exc:  # no descriptor left: it would be readable in every turn
            if not self._told:
                _log.error("no new operator is heard at %s for now: %s", self._path, exc.strerror)
            self._told = True
            self._unwatch(self._sock.fileno())
            self._deaf_until_ns = time.monotonic_ns() + int(LISTEN_AGAIN_S * 1e9)
            return
        self._told = False
        if len(self._open) == MAX_OPERATORS:
            self._hang_up(self._open[0])
        channel: Channel[FromOwner, ToOwner] = Channel(sock, encode, decode_to_owner)
        self._open.append(channel)
        owner.watch(channel.fileno(), lambda: self._serve(owner, channel))

    def _serve(self, owner: DecoderOwner, channel: Channel[FromOwner, ToOwner]) -> None:
        """One message, whose descriptors nobody asked for are closed."""
        try:
            message, descriptors = channel.receive()
        except WouldBlock:
            return
        except (PeerDied, RemoteProtocolError):  # gone, or no operator of ours
            self._hang_up(channel)
            return
        for fd in descriptors:
            os.close(fd)
        if not isinstance(message, Inspect | Reinstate):
            self._hang_up(channel)
            return
        self._reply(channel, answer(owner, message))

    def _reply(self, channel: Channel[FromOwner, ToOwner], reply: FromOwner) -> None:
        try:
            channel.send(reply)
        except WouldBlock:
            return
        except PeerDied:
            pass
        except LocalProtocolError as exc:  # the kernel takes no packet of its size
            _log.warning("an operator gets no answer: %s", exc)
        else:
            return
        self._hang_up(channel)

    def _hang_up(self, channel: Channel[FromOwner, ToOwner]) -> None:
        self._unwatch(channel.fileno())
        self._open.remove(channel)
        channel.close()
        if self._deaf_until_ns is not None:
            self._listen()  # there is a descriptor again


def ask(
    path: Path, message: Inspect | Reinstate, timeout_s: float = ANSWER_TIMEOUT_S
) -> Inspected | Reinstated:
    """Ask the owner that listens at `path`.

    Raises:
        Refused: nobody listens there. NoAnswer, PeerDied: the owner did not answer.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Channel(sock, encode, decode_from_owner) as channel:
        try:
            sock.connect(os.fspath(path))
        except OSError as exc:
            raise Refused(f"no owner listens at {path}: {exc.strerror or exc}") from exc
        channel.send(message)
        if not channel.wait_readable(timeout_s):
            raise NoAnswer(f"the owner at {path} did not answer in {timeout_s:.0f} s")
        reply, _ = channel.receive()
    if not isinstance(reply, Inspected | Reinstated):
        raise RemoteProtocolError(f"the owner answered with {type(reply).__name__}")
    return reply


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        raise Refused(
            f"the control path {path} is longer than {_MAX_PATH_NBYTES} bytes; name a shorter one",
            field="control",
        )
    sock = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        os.fchmod(sock.fileno(), 0o600)  # before the file is there, so that nobody slips in
        try:
            sock.bind(os.fspath(path))
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
            _remove_stale(path)
            sock.bind(os.fspath(path))
        sock.listen(MAX_OPERATORS)
    except OSError as exc:
        sock.close()
        raise Refused(
            f"no control socket can be made at {path}: {exc.strerror or exc}", field="control"
        ) from exc
    except Refused:
        sock.close()
        raise
    return sock


def _remove_stale(path: Path) -> None:
    """Remove the socket of an owner that is dead; refuse whatever else is there."""
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise Refused(f"{path} is no control socket of yours; name another path", field="control")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as exc:
            if exc.errno != errno.EAGAIN:  # it listens, and its queue is full
                raise Refused(
                    f"{path} is no control socket of yours: {exc.strerror}; name another path",
                    field="control",
                ) from exc
    raise Refused(f"another owner listens at {path}; name another path", field="control")
