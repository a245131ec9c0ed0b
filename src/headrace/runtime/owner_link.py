"""The link to one owner process: spawn it, tell it, hear from it, and never wait."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Sequence

import msgspec

from headrace.channel import Channel, socket_pair
from headrace.errors import HeadraceError, PeerDied, Refused, RemoteProtocolError
from headrace.memory import memfd_with
from headrace.messages import (
    Down,
    FromOwner,
    Shutdown,
    Submit,
    ToOwner,
    decode_from_owner,
    decode_to_owner,
    encode,
)
from headrace.process import ChildProcess
from headrace.runtime.config import OwnerConfig
from headrace.runtime.interpreters import check_interpreter
from headrace.runtime.requests import RequestOptions
from headrace.runtime.tuning import Tuning, probe_tuning

OWNER_MODULE = "headrace.runtime.owner_main"
QUEUED_MESSAGES = 64
QUEUED_NBYTES = 1024


class OwnerFailed(HeadraceError):
    """The owner process said that it cannot go on."""


class OwnerLink:
    """One owner process and its channel. Used from one thread, which lives as long as the owner.

    `interpreter`: of the environment that the decoder needs, or None for this process's own. A
    source that names none runs in this process's environment then, and not in the decoder's.
    """

    def __init__(self, config: OwnerConfig, *, interpreter: str | None = None) -> None:
        if interpreter is not None:
            config = config.with_source_python(sys.executable)
        self._config = config
        self._interpreter = interpreter
        self._channel: Channel[ToOwner, FromOwner] | None = None
        self._child: ChildProcess | None = None
        self.tuning: Tuning | None = None  # what the probe found, if it was asked for

    def check(self) -> None:
        """Look at what may take seconds before the owner is spawned; any thread may do it.

        Raises:
            Refused: the interpreter cannot run this headrace.
        """
        if self._interpreter is not None:
            check_interpreter(self._interpreter, "--decoder-python")
        if self._config.tune_copies:
            self.tuning = probe_tuning()

    def spawn(self) -> None:
        """Start the process; `Up` is the first message that comes of it.

        Raises:
            Refused: it cannot be started here.
        """
        ours, theirs = socket_pair(QUEUED_MESSAGES, QUEUED_NBYTES)
        try:
            self._child = ChildProcess.spawn(
                OWNER_MODULE,
                [
                    f"--channel={theirs.fileno()}",
                    f"--config={msgspec.json.encode(self._config).decode()}",
                ],
                interpreter=self._interpreter,
                inherit=[theirs.fileno()],
                env=None if self.tuning is None else self.tuning.environment,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours, encode, decode_from_owner)

    @property
    def pid(self) -> int | None:
        """Of the process, once it was spawned."""
        return None if self._child is None else self._child.pid

    def fileno(self) -> int:
        """The channel's descriptor: readable when `receive` has something to say."""
        return self._open_channel().fileno()

    def send(self, message: ToOwner, fds: Sequence[int] = ()) -> None:
        """Tell the owner something.

        Raises:
            WouldBlock: its queue is full. PeerDied: it is gone.
        """
        self._open_channel().send(message, fds)

    def submit(self, label: int, tokens: Sequence[int], options: RequestOptions) -> None:
        """Start a request, whose messages carry `label`.

        Raises:
            Refused: an option's value makes no sense. WouldBlock, PeerDied: as `send`.
        """
        message = submit_of(label, len(tokens), options)
        try:
            decode_to_owner(encode(message))
        except RemoteProtocolError:
            options.check_values()  # names what the owner could not even read
            raise
        fd = memfd_with(memoryview(array("I", tokens)), "headrace-prompt")
        try:
            self.send(message, [fd])
        finally:
            os.close(fd)

    def receive(self) -> FromOwner:
        """The next message.

        Raises:
            WouldBlock: there is none. PeerDied: the owner is gone. Refused, OwnerFailed: it said
            that it cannot start or go on, for a user's mistake or another reason.
        """
        message, _ = self._open_channel().receive()
        if isinstance(message, Down):
            if message.mistake:
                raise Refused(message.reason, shortage=message.shortage)
            raise OwnerFailed(message.reason)
        return message

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until `receive` has something to say; False if that took too long."""
        return self._open_channel().wait_readable(timeout_s)

    def exit_text(self, timeout_s: float) -> str:
        """How the process ended, of which its channel told; waits for it up to `timeout_s`."""
        child = self._child
        if child is None:
            return "was not started"
        child.wait(timeout_s)
        return f"died (status {child.exit_status()})"

    @property
    def alive(self) -> bool:
        """Whether the process was spawned and lives."""
        return self._child is not None and not self._child.died()

    def statistics(self) -> dict[str, int]:
        """Whether it is alive (0 or 1), and the channel's counts."""
        channel = {} if self._channel is None else self._channel.statistics()
        return {"alive": int(self.alive), **channel}

    def ask_to_end(self) -> bool:
        """Ask it to end in good order; False if it cannot be told."""
        if self._channel is None:
            return False
        try:
            self._channel.send(Shutdown())
        except HeadraceError:  # gone, closed or clogged
            return False
        return True

    def close(self, grace_s: float = 0.0) -> None:
        """Wait for its end, then make sure. Idempotent."""
        if self._child is not None:
            self._child.close(grace_s)
        if self._channel is not None:
            self._channel.close()

    def _open_channel(self) -> Channel[ToOwner, FromOwner]:
        if self._channel is None:
            raise PeerDied("the owner was not started")
        return self._channel


def submit_of(label: int, num_tokens: int, options: RequestOptions) -> Submit:
    """The message that asks an owner for a request."""
    deadline_s = options.deadline_s
    return Submit(
        label,
        num_tokens,
        options.max_tokens,
        options.route,
        options.group_layers,
        options.chunk,
        options.prefill_chunk,
        options.emission,
        options.digest,
        options.stop_tokens,
        options.sampling,
        options.audit,
        options.trace,
        None if deadline_s is None else int(deadline_s * 1e9),
        options.on_failure,
        options.max_attempts,
        options.poison,
        options.prefix,
        options.prefill_cuts,
        options.logprobs,
    )
