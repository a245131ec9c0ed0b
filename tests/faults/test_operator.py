"""What an operator sees of an owner, and how what was set apart comes back into service."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli import run_command
from headrace.errors import DeviceError, PeerDied, Refused, RemoteProtocolError
from headrace.ids import AttemptId
from headrace.messages import (
    Inspect,
    Inspected,
    Reinstate,
    Token,
    encode,
)
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.control import MAX_OPERATORS, ControlSocket, NoAnswer, ask
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient
from tests.faults.lab import CONTEXT, GEOMETRY, Lab, prompt

DRAIN_S = 0.2
STREAMED = RequestOptions(route="streamed", max_tokens=1, audit=True)


def broken(lab: Lab) -> AttemptId:
    """An attempt whose import failed on the device: its lane and its slot are out of service."""
    lab.decoder.fail_imports = 1
    request = lab.submit(prompt(1))
    lab.until_done(request)
    assert (request.outcome, request.cause) == ("failed", "device")
    lab.decoder.fail_imports = None
    lab.until_count("slots", "quarantined", 1)
    return AttemptId(*request.request, 1)


# By the library.


def test_what_a_fault_left_behind_comes_back(tmp_path: Path) -> None:
    with Lab(tmp_path, lanes=1, slots=1, drain_timeout_s=DRAIN_S) as lab:
        lab.gate.open()
        attempt = broken(lab)
        apart = lab.owner.quarantined()
        assert list(apart) == [attempt]
        assert apart[attempt].reason == "the copy engine is on fire"
        assert lab.counts("quarantined") == {"attempts": 1, "lanes": 1, "reads": 1}
        assert lab.counts("lanes") == {"free": 0, "quarantined": 1, "held": 0}
        states = [line.state for line in lab.owner.snapshot().lanes]
        assert states == ["quarantined"]
        with pytest.raises(Refused, match="no prefill source"):
            lab.submit(prompt(2))
        lab.owner.reinstate(attempt)
        assert lab.owner.quarantined() == {}
        assert lab.counts("quarantined") == {"attempts": 0, "lanes": 0, "reads": 0}
        lab.settle()
        lab.serve_exact(2)
        with pytest.raises(Refused, match=r"nothing of attempt .* is quarantined"):
            lab.owner.reinstate(attempt)


def test_a_lane_that_the_device_did_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it does not free it, nothing changes."""

    def fail(held: object) -> None:
        raise RuntimeError("still busy")

    with Lab(tmp_path, lanes=1) as lab:
        lab.gate.open()
        monkeypatch.setattr(lab.decoder, "free", fail)
        request = lab.submit(prompt(1))
        lab.until_done(request)
        assert request.outcome == "finished"
        (attempt,) = lab.owner.quarantined()
        assert lab.owner.quarantined()[attempt].reason == "it was not freed: still busy"
        with pytest.raises(DeviceError, match="was not freed: still busy"):
            lab.owner.reinstate(attempt)
        assert list(lab.owner.quarantined()) == [attempt]
        lab.owner.check_integrity()
        monkeypatch.undo()
        with pytest.raises(Refused, match="no decoder storage is left"):
            lab.submit(prompt(2))
        lab.owner.reinstate(attempt)
        lab.settle()
        lab.serve_exact(2)


# By the owner's channel and by its control socket.


@contextmanager
def owner_process(directory: Path, **changes: Any) -> Iterator[OwnerClient]:
    facts: dict[str, Any] = {
        "decoder": "tests.faults.failing_engines:open_faulty_decoder",
        "decoder_options": {"context": CONTEXT, "lanes": 2, "fails": str(directory / "fails")},
        "sources": (SourceConfig("replay", GEOMETRY),),
        "context": CONTEXT,
        "start_timeout_s": 20.0,
        "drain_timeout_s": DRAIN_S,
        "control": str(directory / "control"),
    }
    client = OwnerClient(OwnerConfig(**facts | changes))
    try:
        client.start()
        yield client
    finally:
        client.close()


def break_it(directory: Path, client: OwnerClient) -> AttemptId:
    """One request that fails on the device."""
    (directory / "fails").touch()
    ended = client.result(client.submit(prompt(1), STREAMED)).ended
    assert (ended.outcome, ended.cause) == ("failed", "device")
    (directory / "fails").unlink()
    (apart,) = client.inspect().quarantined
    assert apart.reason == "the copy engine is on fire"
    return apart.attempt


def test_the_router_may_ask(tmp_path: Path) -> None:
    """Answers are no results: what comes of requests meanwhile is kept."""
    with owner_process(tmp_path) as client:
        attempt = break_it(tmp_path, client)
        label = client.submit(prompt(2), STREAMED)
        client.reinstate(attempt, "the test says so")
        assert client.inspect().quarantined == ()
        assert client.result(label).ended.outcome == "finished"
        with pytest.raises(Refused, match=r"nothing of attempt .* is quarantined"):
            client.reinstate(attempt, "again")
        counts = client.statistics()
        assert (counts["submitted"], counts["ended"], counts["alive"]) == (2, 2, 1)


def test_an_operator_may_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control = str(tmp_path / "control")
    with owner_process(tmp_path) as client:
        mode = os.stat(control).st_mode
        assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
        attempt = break_it(tmp_path, client)
        assert run_command(["owner", "status", control]) == 0
        shown = capsys.readouterr().out
        assert f"quarantined {attempt} for" in shown
        assert "the copy engine is on fire" in shown
        (source,) = client.inspect().sources
        assert f"source replay is in service, pid {source.pid}\n" in shown
        assert f"lanes of {CONTEXT} positions: 1 free\n" in shown
        assert f"lane quarantined, attempt {attempt} for " in shown
        assert "\nslot 1 of source replay, generation 0: free\n" in shown
        assert run_command(["owner", "status", control, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["statistics"]["lanes"]["quarantined"] == 1
        assert [each["attempt"] for each in told["quarantined"]] == [str(attempt)]
        assert [each["state"] for each in told["lanes"]] == ["quarantined"]
        assert [each["name"] for each in told["sources"]] == ["replay"]
        assert (told["context"], told["lanes_free"], told["truncated"]) == (CONTEXT, 1, False)
        assert run_command(["owner", "reinstate", control, str(attempt), "--because", "ok"]) == 0
        assert capsys.readouterr().out == f"{attempt} is in service again\n"
        assert run_command(["owner", "reinstate", control, str(attempt), "--because", "ok"]) == 1
        complaint = capsys.readouterr().err
        assert "stays in quarantine: nothing of attempt" in complaint
        assert complaint.count("\n") == 1
        assert run_command(["owner", "status", control]) == 0
        assert "nothing is quarantined" in capsys.readouterr().out
        assert client.result(client.submit(prompt(2), STREAMED)).ended.outcome == "finished"
    assert not os.path.lexists(control)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["status", "{}/nowhere"], "no owner listens at"),
        (["status"], "PATH"),
        (["reinstate", "{}/nowhere", "1.2/3", "--because", "x"], "no owner listens at"),
        (["reinstate", "{}/nowhere", "1.2", "--because", "x"], "'1.2' names no attempt"),
        (["reinstate", "{}/nowhere", "zz.1/1", "--because", "x"], "names no attempt"),
        (["reinstate", "{}/nowhere", "1.2/3", "--because", " "], "--because is empty"),
        (["reinstate", "{}/nowhere", "1.2/3"], "because"),
    ],
)
def test_a_mistake_gets_one_sentence(
    tmp_path: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(tmp_path) for argument in arguments]
    assert run_command(["owner", *given]) == 2
    complaint = capsys.readouterr().err
    assert text.lower() in complaint.lower()
    assert complaint.count("\n") == 1


# The socket itself.


def test_a_dead_owners_socket_is_replaced(tmp_path: Path) -> None:
    with owner_process(tmp_path) as client:
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(PeerDied):
            client.inspect()
    assert (tmp_path / "control").exists()
    with owner_process(tmp_path):
        assert isinstance(ask(tmp_path / "control", Inspect()), Inspected)
    assert not (tmp_path / "control").exists()


def test_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("mine")
    with (
        pytest.raises(Refused, match="is no control socket of yours; name another path"),
        owner_process(tmp_path),
    ):
        pass
    assert (tmp_path / "control").read_text() == "mine"
    os.unlink(tmp_path / "control")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
        foreign.bind(str(tmp_path / "control"))
        foreign.listen()
        with pytest.raises(Refused, match="is no control socket of yours"), owner_process(tmp_path):
            pass
    assert (tmp_path / "control").exists()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("x" * 200, "is longer than 107 bytes"),
        ("nowhere/control", "no control socket can be made at .*No such file"),
    ],
)
def test_a_path_that_cannot_be(tmp_path: Path, path: str, text: str) -> None:
    with pytest.raises(Refused, match=text) as caught:
        ControlSocket(str(tmp_path / path))
    assert caught.value.field == "control"


def test_another_owners_socket_is_left_alone(tmp_path: Path) -> None:
    first = ControlSocket(str(tmp_path / "control"))
    with pytest.raises(Refused, match="another owner listens at"):
        ControlSocket(str(tmp_path / "control"))
    first.close()
    first.close()
    assert not (tmp_path / "control").exists()
    again = ControlSocket(str(tmp_path / "control"))
    os.unlink(tmp_path / "control")
    (tmp_path / "control").write_text("not its own")
    again.close()
    assert (tmp_path / "control").exists()


def test_who_asks_before_the_owner_is_there_is_answered_by_it(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    control = ControlSocket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early:
        early.connect(path)
        early.send(encode(Inspect()))
        with Lab(tmp_path) as lab:
            control.serve(lab.owner)
            for _ in range(3):
                lab.owner.turn(0.05)
            assert msgspec.msgpack.decode(early.recv(1 << 16))[0] == "inspected"
    control.close()  # after its owner is harmless, too


def test_operators_that_misbehave_hold_nobody_up(tmp_path: Path) -> None:
    """Garbage, the wrong message, a hang-up, and more of them than are heard."""
    path = str(tmp_path / "control")
    with Lab(tmp_path) as lab:
        lab.gate.open()
        control = ControlSocket(path)
        control.serve(lab.owner)
        opened = []
        for payload in (b"\xc1", encode(Token(1, 2)), b"", *[None] * (MAX_OPERATORS + 3)):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.append(sock)
            sock.connect(path)
            if payload:
                sock.send(payload)
            lab.owner.turn(0.05)
            lab.owner.turn(0.0)
        assert len(control._open) == MAX_OPERATORS
        request = Reinstate(AttemptId(1, 2, 3), "x")
        opened[-1].send(encode(request))
        for _ in range(3):
            lab.owner.turn(0.05)
        answer = msgspec.msgpack.decode(opened[-1].recv(1 << 16))
        assert answer[0] == "reinstated"
        assert "is quarantined" in answer[2]
        for sock in opened:
            sock.close()
        lab.serve_exact(1)
        lab.until(lambda: not control._open, "all have hung up")
        control.close()


def test_an_owner_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "control"
    with Lab(tmp_path) as lab:
        control = ControlSocket(str(path))
        control.serve(lab.owner)
        with pytest.raises(NoAnswer, match="did not answer in 0 s"):
            ask(path, Inspect(), timeout_s=0.05)
        control.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(path))
        other.listen()
        with (
            subprocess.Popen(
                [sys.executable, "-c", CHATTER, str(other.fileno())], pass_fds=[other.fileno()]
            ),
            pytest.raises(RemoteProtocolError, match="answered with Token"),
        ):
            ask(path, Inspect())


CHATTER = """
import socket, sys
from headrace.messages import Token, encode
sock, _ = socket.socket(fileno=int(sys.argv[1])).accept()
sock.recv(1000)
sock.send(encode(Token(1, 2)))
"""
