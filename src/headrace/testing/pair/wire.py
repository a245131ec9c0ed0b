"""The channel of a running attempt, as a bug in its source could reach it. Needs msgspec only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

from headrace.backends.base import PrefillSink
from headrace.messages import FromSource
from headrace.testing.pair.strays import Packet, WithDescriptors


class Wire:
    """The real channel under a sink, which a buggy engine's stray code could reach as well."""

    def __init__(self, sink: PrefillSink) -> None:
        self._sink = cast(Any, sink)
        self._fd: int = self._sink._send.__self__.fileno()

    def put(self, packet: Packet) -> None:
        """Send a packet as it is, however wrong, waiting for room."""
        if isinstance(packet, WithDescriptors):
            with os.fdopen(os.memfd_create("stray"), "wb") as stray:
                self._send(packet.payload, [stray.fileno()])
        else:
            self._send(packet, [])

    def _send(self, payload: bytes, fds: Sequence[int]) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        with socket.socket(fileno=os.dup(self._fd)) as sock:
            while True:
                try:
                    socket.send_fds(sock, [payload], fds)
                except BlockingIOError:
                    poll.poll()
                else:
                    return

    def hang_up(self) -> NoReturn:
        """End the channel and live on."""
        with socket.socket(fileno=os.dup(self._fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
        while True:
            signal.pause()

    @contextlib.contextmanager
    def before_sending(self, act: Callable[[], None]) -> Iterator[None]:
        """Do `act` when all is stamped and nothing is sent."""
        send = self._sink._send

        def act_and_send(message: FromSource) -> None:
            act()
            send(message)

        self._sink._send = act_and_send
        try:
            yield
        finally:
            self._sink._send = send
