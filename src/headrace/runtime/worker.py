"""The handle of one source process: its spawn, its slab, its channel, its death.

A handle belongs to one owner, which drives it from its own loop (`attach` and the calls below).
The class that a caller without an owner uses, `SubprocessPrefillWorker`, is built on it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec

from headrace.channel import Channel, socket_pair
from headrace.errors import (
    BackendUnavailable,
    Closed,
    HeadraceError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)
from headrace.geometry import Layout, Manifest, agree
from headrace.ids import AttemptId, Span
from headrace.memory import Slab
from headrace.messages import (
    MAX_PROGRESS,
    MAX_SPANS,
    Attached,
    FromSource,
    Hello,
    Incompatible,
    Progress,
    Ready,
    Shutdown,
    ToSource,
    decode_from_source,
    encode,
)
from headrace.plan import slot_layout
from headrace.process import ChildProcess

_M = TypeVar("_M", bound=FromSource)

SOURCE_MODULE = "headrace.runtime.source_main"
IMPORT_TIMEOUT_S = 60.0
MESSAGES_PER_ATTEMPT = MAX_PROGRESS + 35  # its final, its release, and words of one that computes


class SourceHandle:
    """One source process and what is shared with it."""

    def __init__(
        self,
        engine: str,
        options: Mapping[str, Any] | None = None,
        *,
        interpreter: str | None = None,
        num_slots: int = 2,
        start_timeout_s: float = 300.0,
        log_level: str = "WARNING",
        env: Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        """`engine` names one (torch, replay, module:factory) in the environment of `interpreter`.

        `env`: variables over those of this process, such as a vendor's device choice. `name`: what
        logs and reasons call it, by default as its engine.

        Raises:
            Refused: num_slots is below one.
        """
        if num_slots < 1:
            raise Refused(f"slots is {num_slots}; a source needs at least one", field="slots")
        self.engine = engine
        self.name = name or engine
        self.num_slots = num_slots
        self.slot_nbytes = 0
        self.layout: Layout = "head_major"
        self._options = dict(options or {})
        self._interpreter = interpreter
        self.start_timeout_s = start_timeout_s
        self._log_level = log_level
        self._env = dict(env or {})
        self._child: ChildProcess | None = None
        self._channel: Channel[ToSource, FromSource] | None = None
        self._slab: Slab | None = None
        self._manifest: Manifest | None = None
        self._told_to_end = False

    def respawn(self) -> SourceHandle:
        """A handle of the same configuration that was not started yet."""
        return SourceHandle(
            self.engine,
            self._options,
            interpreter=self._interpreter,
            num_slots=self.num_slots,
            start_timeout_s=self.start_timeout_s,
            log_level=self._log_level,
            env=self._env,
            name=self.name,
        )

    @property
    def maker(self) -> str:
        """Who computes: the same for two sources that compute the same bits."""
        how = [self._options, self._interpreter, self._env]
        return f"{self.engine} {msgspec.json.encode(how, order='sorted').decode()}"

    def start(self) -> None:
        """Spawn the process and return at once; it loads its engine meanwhile.

        Call it from a thread that outlives the source: the kernel kills a child when the thread
        that spawned it exits.

        Raises:
            Refused: the interpreter is missing, or socket buffers are too small.
        """
        ours, theirs = socket_pair(MESSAGES_PER_ATTEMPT, worst_progress_nbytes())
        try:
            self._child = ChildProcess.spawn(
                SOURCE_MODULE,
                [
                    f"--channel={theirs.fileno()}",
                    f"--engine={self.engine}",
                    f"--options={msgspec.json.encode(self._options).decode()}",
                    f"--log-level={self._log_level}",
                ],
                interpreter=self._interpreter,
                inherit=[theirs.fileno()],
                env=self._env,
            )
        except HeadraceError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours, encode, decode_from_source)

    @property
    def manifest(self) -> Manifest:
        """The source's manifest; waits until the engine has loaded.

        Raises:
            Refused: the source cannot start or serve; PeerDied: it died.
        """
        if self._manifest is None:
            message = self._expect(Ready)
            self._manifest = message.manifest
        return self._manifest

    def attach(self, decoder: Manifest, context: int, epoch: int) -> None:
        """Agree with the decoder, make the slab, and wait until the source has mapped it.

        Raises:
            Refused: the manifests differ in a field, or memory is short.
            PeerDied: the source died.
        """
        _ = self.manifest
        self.greet(decoder, context, epoch)
        self._expect(Attached)

    # The same in pieces, for a caller that must not wait.

    def take_manifest(self) -> Manifest | None:
        """The manifest if it has come; raises as `attach`, and RemoteProtocolError."""
        ready = self._take(Ready)
        self._manifest = None if ready is None else ready.manifest
        return self._manifest

    def take_attached(self) -> bool:
        """Whether the source has answered `greet`; raises as `attach`, and RemoteProtocolError."""
        return self._take(Attached) is not None

    def greet(self, decoder: Manifest, context: int, epoch: int) -> None:
        """Agree with the decoder and send the slab, which is allocated and touched here.

        Raises:
            Refused: the manifests differ in a field, or memory is short. PeerDied.
        """
        self.layout = agree(self.manifest, decoder)
        for role, manifest in (("source", self.manifest), ("decoder", decoder)):
            if context > manifest.max_positions:
                raise Refused(
                    f"context {context} is more than the {role}'s {manifest.max_positions} "
                    "positions; lower --context",
                    field="context",
                )
        self.slot_nbytes = slot_layout(decoder, context).nbytes
        self._slab = Slab.create(self.num_slots * self.slot_nbytes)
        hello = Hello(epoch, decoder, context, self.num_slots, self.slot_nbytes)
        self._open_channel().send(hello, [self._slab.fd])
        self._slab.close_fd()

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        begin = index * self.slot_nbytes
        return self._open_slab().view[begin : begin + self.slot_nbytes]

    def slot_address(self, index: int) -> int:
        """The address of a slot's first byte in this process."""
        return self._open_slab().address + index * self.slot_nbytes

    def send(self, message: ToSource) -> None:
        """Queue a message; raises PeerDied if the source is gone."""
        self._open_channel().send(message)

    def receive(self) -> FromSource:
        """The next message; raises WouldBlock, PeerDied or RemoteProtocolError."""
        message, descriptors = self._open_channel().receive()
        if descriptors:
            for fd in descriptors:
                os.close(fd)
            raise RemoteProtocolError("a source sends no descriptors")
        return message

    @property
    def channel_fd(self) -> int:
        return self._open_channel().fileno()

    @property
    def death_fd(self) -> int:
        """A descriptor that is readable once the source's whole process is gone."""
        return self._open_child().fileno()

    @property
    def pid(self) -> int:
        return self._open_child().pid

    @property
    def running_pid(self) -> int:
        """The pid of its process, or 0 if there is none that lives."""
        return 0 if self._child is None or self._child.died() else self._child.pid

    def died(self) -> bool:
        """Whether the process is proven gone."""
        return self._open_child().died()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the process's death; True when it is gone."""
        return self._open_child().wait(timeout_s)

    def exit_text(self) -> str:
        """How it ended, for a reason."""
        status = self._open_child().exit_status()
        how = f"exit status {status}" if status is None or status >= 0 else f"signal {-status}"
        return f"source {self.name} (pid {self.pid}) died: {how}"

    def late_text(self) -> str:
        """That it took longer to start than it may, for a reason."""
        return f"source {self.name} did not get ready in {self.start_timeout_s:.0f} s"

    def kill(self) -> None:
        """End the process now; its death is told by `death_fd`."""
        self._open_child().kill()

    def statistics(self) -> dict[str, int]:
        """Counts: whether it lives, its slots and their bytes, its messages both ways."""
        channel = {} if self._channel is None else self._channel.statistics()
        return {
            "alive": int(self._child is not None and not self._child.died()),
            "slots": self.num_slots,
            "slab_nbytes": 0 if self._slab is None else self._slab.nbytes,
            **channel,
        }

    def close(self, grace_s: float = 2.0, *, aside: bool = False) -> None:
        """Ask the source to end, wait, then make sure; frees the slab last. Idempotent.

        `aside`: the slab is unmapped in a thread of its own, for an owner whose turns go on.
        """
        if not self.tell_to_end():
            grace_s = 0.0
        if self._child is not None:
            self._child.close(grace_s)
        if self._channel is not None:
            self._channel.close()
        if self._slab is not None:
            if aside:
                self._slab.close_aside()
            else:
                self._slab.close()

    def tell_to_end(self) -> bool:
        """Ask the source to end, once; False if it cannot be asked any more."""
        if self._channel is None or self._told_to_end:
            return True
        try:
            self._channel.send(Shutdown())
        except (PeerDied, WouldBlock, Closed):
            return False
        self._told_to_end = True
        return True

    def _expect(self, kind: type[_M]) -> _M:
        """The next message, which must be of `kind`; waits at most the start timeout."""
        deadline_s = time.monotonic() + self.start_timeout_s
        while True:
            try:
                message = self._take(kind)
            except PeerDied as exc:
                self._open_child().wait(5.0)
                if kind is Ready and self._interpreter is not None:
                    _check_interpreter(self._interpreter)
                raise PeerDied(f"{self.exit_text()} while starting") from exc
            if message is not None:
                return message
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise Refused(self.late_text(), field="source")
            self._open_channel().wait_readable(left_s)

    def _take(self, kind: type[_M]) -> _M | None:
        """The next message, which must be of `kind`, or None if none has come."""
        try:
            message, descriptors = self._open_channel().receive()
        except WouldBlock:
            return None
        for fd in descriptors:
            os.close(fd)
        if isinstance(message, Incompatible):
            if message.field == BackendUnavailable.__name__:
                raise Refused(f"source {self.name} is unavailable: {message.reason}")
            raise Refused(
                f"source {self.name}: {message.reason}",
                field=message.field,
                shortage=message.shortage,
            )
        if not isinstance(message, kind):
            raise RemoteProtocolError(f"source {self.name} sent {type(message).__name__} first")
        return message

    def _open_channel(self) -> Channel[ToSource, FromSource]:
        if self._channel is None:
            raise Closed(f"source {self.name} was not started")
        return self._channel

    def _open_child(self) -> ChildProcess:
        if self._child is None:
            raise Closed(f"source {self.name} was not started")
        return self._child

    def _open_slab(self) -> Slab:
        if self._slab is None:
            raise Closed(f"source {self.name} has no slab before it is attached")
        return self._slab


def close_together(handles: Sequence[SourceHandle], grace_s: float = 2.0) -> None:
    """Close several sources, of which none waits for another's end."""
    for handle in handles:
        handle.tell_to_end()
    end_s = time.monotonic() + grace_s
    with ExitStack() as stack:  # whatever one raises, the others are closed
        for handle in handles:
            stack.callback(lambda each: each.close(max(0.0, end_s - time.monotonic())), handle)


def _check_interpreter(interpreter: str) -> None:
    """Refuse one that cannot import what a source is started with; asked only after a death."""
    command = [interpreter, "-c", f"import {SOURCE_MODULE}"]
    try:
        probe = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=IMPORT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if probe.returncode:
        said = probe.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Refused(
            f"interpreter {interpreter!r} cannot run headrace: {said}. Run "
            f"`{interpreter} -m pip install headrace`, or give another environment's Python",
            field="interpreter",
        )


def worst_progress_nbytes() -> int:
    """Bytes of the largest progress message that a source may send."""
    big = (1 << 32) - 1
    attempt = AttemptId(2**63 - 1, 2**63 - 1, big)
    span = Span(2**16 - 1, 2**16 - 1, big, big)
    digests: Sequence[int] = (big,) * MAX_SPANS
    spans = (span,) * MAX_SPANS
    return len(encode(Progress(attempt, big, big, spans, tuple(digests), 2**62, 2**62, 2**62)))
