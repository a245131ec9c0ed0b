"""An owner's control socket when this process runs short of means, or is itself at fault."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headrace.channel import Channel
from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId
from headrace.messages import Inspect, Reinstate, encode
from headrace.runtime.control import ControlSocket, answer
from tests.faults.lab import Lab


@contextmanager
def no_descriptor_left(highest: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("then", ["time passes", "another hangs up"])
def test_an_owner_without_a_descriptor_left_hears_operators_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    then: str,
) -> None:
    """A listener that cannot accept would be readable in every turn; it is told of once."""
    again_s = 0.0 if then == "time passes" else 1e6
    monkeypatch.setattr("headrace.runtime.control.LISTEN_AGAIN_S", again_s)
    path = str(tmp_path / "control")
    kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
    with Lab(tmp_path) as lab, socket.socket(*kind) as first, socket.socket(*kind) as second:
        control = ControlSocket(path)
        control.serve(lab.owner)
        first.connect(path)
        lab.until(lambda: len(control._open) == 1, "the first is heard")
        second.connect(path)
        second.send(encode(Inspect()))
        with no_descriptor_left(max(map(int, os.listdir("/proc/self/fd")))):
            held = fill_descriptors()
            for _ in range(3):
                lab.owner.turn(0.0)
        for fd in held:
            os.close(fd)
        assert caplog.text.count("no new operator is heard") == 1
        if then == "another hangs up":
            lab.owner.turn(0.0)
            assert len(control._open) == 1
            first.close()
        second.settimeout(0.0)
        lab.until(lambda: has_answer(second), "the second is answered")
        control.close()
        assert not os.path.lexists(path)
        lab.gate.open()
        lab.serve_exact(1)


def fill_descriptors() -> list[int]:
    """Take all that are below the limit."""
    held: list[int] = []
    with suppress(OSError):
        while True:
            held.append(os.dup(0))
    return held


def has_answer(operator: socket.socket) -> bool:
    with suppress(BlockingIOError):
        return bool(operator.recv(1, socket.MSG_PEEK))
    return False


def test_a_connection_that_was_aborted_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Aborted:
        def accept(self) -> None:
            raise ConnectionAbortedError

    with Lab(tmp_path) as lab:
        control = ControlSocket(str(tmp_path / "control"))
        control.serve(lab.owner)
        with monkeypatch.context() as patch:
            patch.setattr(control, "_sock", Aborted())
            control._accept(lab.owner)
        assert control._deaf_until_ns is None
        assert caplog.text == ""
        control.close()


def test_an_answer_that_cannot_be_sent_ends_its_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "control"

    def too_long(*_: object) -> None:
        raise LocalProtocolError("cannot send 60000 bytes: Message too long")

    with (
        Lab(tmp_path) as lab,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as operator,
    ):
        control = ControlSocket(str(path))
        control.serve(lab.owner)
        operator.connect(str(path))
        lab.until(lambda: len(control._open) == 1, "it is heard")
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", too_long)
            operator.send(encode(Inspect()))
            lab.until(lambda: not control._open, "it is hung up on")
        assert operator.recv(1) == b""
        assert "an operator gets no answer: cannot send 60000 bytes" in caplog.text
        lab.gate.open()
        lab.serve_exact(1)
        control.close()


def test_a_bug_of_the_owners_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(attempt: AttemptId) -> None:
        raise LocalProtocolError("a rule was broken")

    with Lab(tmp_path) as lab:
        monkeypatch.setattr(lab.owner, "reinstate", wrong)
        with pytest.raises(LocalProtocolError, match="a rule was broken"):
            answer(lab.owner, Reinstate(AttemptId(1, 2, 3), "x"))
