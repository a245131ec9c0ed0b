"""The control channel: whole messages and descriptors over AF_UNIX SOCK_SEQPACKET, never blocking.

One message is one packet, so a peer that is killed leaves a whole message or none. KV bytes never
travel here: a message stays under 64 KiB and a descriptor carries the slab. Nothing in this file
waits except `wait_readable`; a queue that is full is an answer (`WouldBlock`), and `socket_pair`
proves at start that the number of messages a plan can produce fits without the reader's help.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from headrace.errors import (
    Closed,
    LocalProtocolError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)

MAX_MESSAGE_NBYTES = 65_536 - 512
MAX_FDS = 4  # even, since the kernel pads descriptors to 8 bytes and would let one more through
MAX_QUEUED_NBYTES = 256 << 20
"""Bound on one direction of a pair, bookkeeping included: above it the plan is what is wrong."""

# What the kernel charges per packet beside its bytes; only a first guess, as the pair is tried out.
_PACKET_OVERHEAD_NBYTES = 1024
_MIN_BUFFER_NBYTES = 8192  # above the kernel's floor, so that a doubled wish is a doubled grant
_SO_SNDBUFFORCE = 32  # not named by the socket module
_MAX_BUFFER_NBYTES = (1 << 30) - 1  # the kernel doubles it into a C int
_FDS_NBYTES = array.array("i").itemsize * MAX_FDS

Out = TypeVar("Out")
In = TypeVar("In")
_Ancillary = list[tuple[int, int, bytes]]


class Channel(Generic[Out, In]):
    """One end of a control channel; sends `Out`, receives `In`. One thread uses it.

    `encode` yields 1 to MAX_MESSAGE_NBYTES bytes. `decode` takes any bytes at all and raises
    `RemoteProtocolError` for those that are no message; whatever it raises reaches the caller of
    `receive`. The channel owns `sock` from here on.

    Raises: LocalProtocolError when `sock` does not keep message boundaries.
    """

    def __init__(
        self, sock: socket.socket, encode: Callable[[Out], bytes], decode: Callable[[bytes], In]
    ) -> None:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            raise LocalProtocolError(
                f"a channel needs an AF_UNIX SOCK_SEQPACKET socket, got {sock}"
            )
        sock.setblocking(False)
        # An end that came by exec is inheritable, and a grandchild holding it would hide our death.
        sock.set_inheritable(False)
        self._sock: socket.socket | None = sock
        self._encode = encode
        self._decode = decode
        self._counts = dict.fromkeys(("sent", "sent_nbytes", "no_room", "received", "refused"), 0)

    def send(self, message: Out, fds: Sequence[int] = ()) -> None:
        """Queue one message and duplicates of `fds`, which stay the caller's; whole or not at all.

        Raises: WouldBlock when the queue is full; PeerDied (messages that the peer sent before can
        still be received); LocalProtocolError for an empty or oversized message or unusable
        descriptors; Closed.
        """
        sock = self._open_socket()
        payload = self._encode(message)
        _check_outgoing(payload, fds)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sock.sendmsg([payload], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            self._counts["no_room"] += 1
            raise WouldBlock(f"no room to queue {len(payload)} bytes") from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerDied("the peer closed its end of the channel") from error
        except OSError as error:
            # What is left is ours: a descriptor that is not open, or a buffer below one packet.
            raise LocalProtocolError(
                f"cannot send {len(payload)} bytes with descriptors {list(fds)}: {error.strerror}"
            ) from error
        self._counts["sent"] += 1
        self._counts["sent_nbytes"] += len(payload)

    def receive(self) -> tuple[In, list[int]]:
        """Take the next message and its descriptors (close-on-exec), now the caller's.

        Raises: WouldBlock when nothing is there; PeerDied at the end of the stream, after every
        message sent before it; RemoteProtocolError for a message that is empty, truncated, over
        MAX_FDS descriptors or undecodable (its descriptors are closed); Closed.
        """
        sock = self._open_socket()
        payload, ancillary, flags = _next_packet(sock)
        fds = _descriptors(ancillary)
        try:
            _check_incoming(sock, payload, flags)
            message = self._decode(payload)
        except BaseException as error:
            self._counts["refused"] += isinstance(error, RemoteProtocolError)
            for fd in fds:
                os.close(fd)
            raise
        self._counts["received"] += 1
        return message, fds

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds (negative: none) until `receive` will not block.

        Raises: Closed.
        """
        return _poll(self._open_socket(), select.POLLIN, timeout_s)

    def statistics(self) -> dict[str, int]:
        """Messages sent, their bytes, those that found no room; received, and refused as none."""
        return {**self._counts, "open": int(self._sock is not None)}

    def fileno(self) -> int:
        """The socket's descriptor, for a selector. Raises: Closed."""
        return self._open_socket().fileno()

    def close(self) -> None:
        """Close this end; the peer reads what is queued and then its end. Once more is harmless."""
        if self._sock is not None:
            sock, self._sock = self._sock, None
            sock.close()

    def _open_socket(self) -> socket.socket:
        if self._sock is None:
            raise Closed("the channel is closed on this side")
        return self._sock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_outgoing(payload: bytes, fds: Sequence[int]) -> None:
    if not 1 <= len(payload) <= MAX_MESSAGE_NBYTES:
        raise LocalProtocolError(
            f"a message has 1 to {MAX_MESSAGE_NBYTES} bytes, this one {len(payload)}"
        )
    if len(fds) > MAX_FDS:
        raise LocalProtocolError(f"a message carries up to {MAX_FDS} descriptors, got {len(fds)}")


def _next_packet(sock: socket.socket) -> tuple[bytes, _Ancillary, int]:
    """Receive one packet, after the reset that a peer leaves when it dies with messages unread.

    The kernel reports that reset once and *before* the messages the peer had sent, which are still
    queued: taking it for the end would lose them.
    """
    space = socket.CMSG_LEN(_FDS_NBYTES)
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        try:
            payload, ancillary, seen, _ = sock.recvmsg(MAX_MESSAGE_NBYTES, space, flags)
        except ConnectionResetError:
            payload, ancillary, seen, _ = sock.recvmsg(MAX_MESSAGE_NBYTES, space, flags)
    except BlockingIOError as error:
        raise WouldBlock("no message is waiting") from error
    return payload, ancillary, seen


def _descriptors(ancillary: _Ancillary) -> list[int]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds.tolist()


def _check_incoming(sock: socket.socket, payload: bytes, flags: int) -> None:
    if flags & socket.MSG_TRUNC:
        raise RemoteProtocolError(f"a message is longer than {MAX_MESSAGE_NBYTES} bytes")
    if flags & socket.MSG_CTRUNC:
        raise RemoteProtocolError(
            f"a message lost descriptors: more than {MAX_FDS} sent, or `ulimit -n` reached here"
        )
    if not payload:
        # An empty packet and the end of the stream read alike; only the end hangs up.
        if _poll(sock, select.POLLRDHUP, 0.0):
            raise PeerDied("the peer closed its end of the channel")
        raise RemoteProtocolError("a message is empty")


def _poll(sock: socket.socket, events: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def socket_pair(messages: int, message_nbytes: int) -> tuple[socket.socket, socket.socket]:
    """Make a connected pair that queues `messages` packets of `message_nbytes` bytes each way.

    It is tried out on a scratch pair of the same size, since what the kernel charges for a packet
    is its own affair. Neither socket is inheritable: pass the child's end by its descriptor, on
    purpose.

    Raises: LocalProtocolError for sizes that are no message; Refused when the system's limit is too
    low.
    """
    if messages < 1 or not 1 <= message_nbytes <= MAX_MESSAGE_NBYTES:
        raise LocalProtocolError(
            f"cannot queue {messages} messages of {message_nbytes} bytes: at least one message of "
            f"1 to {MAX_MESSAGE_NBYTES} bytes"
        )
    wanted = max(_MIN_BUFFER_NBYTES, messages * (message_nbytes + _PACKET_OVERHEAD_NBYTES))
    if wanted > MAX_QUEUED_NBYTES:
        raise Refused(
            f"{messages} messages of {message_nbytes} bytes need about {wanted} bytes of socket "
            f"buffer, at most {MAX_QUEUED_NBYTES} are used. Announce in larger spans"
        )
    granted = 0
    while True:
        queued, room = _try_out(wanted, messages, message_nbytes)
        if queued == messages:
            return _sized_pair(wanted)
        if room <= granted:
            raise _too_small(queued, messages, message_nbytes, room)
        granted, wanted = room, wanted * 2


def _sized_pair(send_nbytes: int) -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (near, far):
        # Packets on AF_UNIX are charged to the sender alone, so SO_RCVBUF has no part in this.
        size = min(send_nbytes, _MAX_BUFFER_NBYTES)
        try:
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, size)
        except OSError:  # without CAP_NET_ADMIN: up to net.core.wmem_max, which the try-out judges
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    return near, far


def _try_out(send_nbytes: int, messages: int, message_nbytes: int) -> tuple[int, int]:
    """Packets that fit the worse way of a scratch pair, and the bytes of buffer it was granted."""
    near, far = _sized_pair(send_nbytes)
    with near, far:
        payload = bytes(message_nbytes)
        queued = min(_fill(near, messages, payload), _fill(far, messages, payload))
        return queued, near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _fill(sock: socket.socket, messages: int, payload: bytes) -> int:
    for queued in range(messages):
        try:
            sock.send(payload, socket.MSG_DONTWAIT)
        except OSError as error:
            # EMSGSIZE: a single packet is already above the buffer.
            if error.errno not in (errno.EAGAIN, errno.EMSGSIZE):
                raise
            return queued
    return messages


def _too_small(queued: int, messages: int, message_nbytes: int, room: int) -> Refused:
    limit = room // 2  # the kernel doubles what it grants, to cover its bookkeeping
    needed = -(-limit * messages // max(1, queued))
    return Refused(
        f"the control socket queues {queued} of {messages} messages of {message_nbytes} bytes with "
        f"a buffer of {limit} bytes, about {needed} are needed. Raise net.core.wmem_max: "
        f"sysctl -w net.core.wmem_max={needed}"
    )
