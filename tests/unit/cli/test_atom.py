"""`headrace atom probe`: what it runs, and what its end comes to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import atom, run_command
from headrace.cli.children import run_tied
from headrace.engine import records
from headrace.engine.atom import environment, preflight, reference
from headrace.engine.atom.record import Record, usable
from headrace.engine.atom.sdk import Sdk
from headrace.engine.checkpoint import fingerprint
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from tests.e2e.families import directory_of

MODULE = "tests.unit.cli.test_atom"
Ran = list[tuple[str, str, list[str]]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    directory = tmp_path / "compiled"
    compile_fake(directory_of("llama"), directory, max_seq_len=64)
    return directory


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What preflight was asked for; all is well."""
    told: list[Any] = []
    monkeypatch.setattr(preflight, "check", lambda *given, **named: told.append((given, named)))
    return told


Children = Callable[..., Ran]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    """Have the children end so: the one that computes the checkpoint, and the one that probes."""

    def set_up(reference: int = 0, probe: int = 0, printed: str = "") -> Ran:
        ran: Ran = []

        def run(interpreter: str, module: str, arguments: list[str]) -> tuple[int, bytes]:
            ran.append((interpreter, module, arguments))
            first = module == atom.REFERENCE_MODULE
            return (reference, b"") if first else (probe, printed.encode())

        monkeypatch.setattr(atom, "run_tied", run)
        return ran

    return set_up


def command(compiled: Path, *more: str) -> list[str]:
    model = str(directory_of("llama"))
    return ["atom", "probe", "--model", model, "--compiled", str(compiled), *more]


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str], *, status: int = 2) -> str:
    assert run_command(arguments) == status
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("headrace: ")
    return line.removeprefix("headrace: ")


def test_a_card_is_probed_in_the_vendors_environment_with_a_checkpoint_from_here(
    compiled: Path,
    tmp_path: Path,
    asked: list[Any],
    children: Children,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = tmp_path / "record.json"
    record.touch()
    ran = children(printed=f"a banner\n{record}\nfreed 3 buffers\n")
    more = ["--device", "2", "--share-device", "--python", "/a/python", "--out", str(record)]
    assert run_command(command(compiled, *more)) == 0
    assert capsys.readouterr().out == f"{record}\n"
    assert asked == [(("/a/python",), {"device": 2, "share": True})]
    (own, module, told), (other, probing, arguments) = ran
    assert (own, module) == (sys.executable, "headrace.engine.atom.reference")
    reference = told[-1].removeprefix("--out=")
    assert told[:-1] == [f"--model={directory_of('llama')}", f"--compiled={compiled}"]
    assert (other, probing) == ("/a/python", "headrace.engine.atom.probe")
    assert arguments == [
        f"--compiled={compiled}",
        "--device=2",
        f"--reference={reference}",
        f"--out={record}",
    ]
    assert not Path(reference).parent.exists()


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_probe_that_has_said_all_ends_the_command_so(
    compiled: Path,
    tmp_path: Path,
    children: Children,
    capsys: pytest.CaptureFixture[str],
    status: int,
) -> None:
    (tmp_path / "record").touch()
    children(probe=status, printed=str(tmp_path / "record"))
    assert run_command(command(compiled, "--python", "x")) == status
    shown = capsys.readouterr()
    assert shown.out == ("" if status == 2 else f"{tmp_path / 'record'}\n")
    assert shown.err == ""


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({"probe": -6}, "the probe of device 0 ended with signal 6"),
        ({"probe": 0}, "the probe of device 0 wrote no record"),
        ({"reference": -9}, "computing the checkpoint ended with signal 9"),
    ],
)
def test_a_child_that_died_is_one_sentence(
    compiled: Path,
    children: Children,
    capsys: pytest.CaptureFixture[str],
    ends: dict[str, int],
    said: str,
) -> None:
    children(**ends)
    assert complaint(command(compiled, "--python", "x"), capsys, status=1) == said


@pytest.mark.usefixtures("asked")
def test_a_checkpoint_that_cannot_be_computed_has_said_why(
    compiled: Path, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = children(reference=2)
    assert run_command(command(compiled, "--python", "x")) == 2
    assert len(ran) == 1
    assert capsys.readouterr().out == ""


def test_a_probe_begins_with_preflight(
    compiled: Path, children: Children, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran = children()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    said = complaint(command(compiled, "--python", str(python)), capsys)
    assert said.startswith("rebellions: sdk_missing: ")
    assert ran == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--device", "-1"], "--device is -1"),
        (["--out", "/"], "--out: / is a directory"),
        (["--python", " "], "--python is empty"),
        (["--compiled", "/nonexistent"], "/nonexistent holds no rbln_config.json"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
    ],
)
def test_a_probe_that_makes_no_sense(
    compiled: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(compiled)
    flag = more[0]
    if flag in arguments:
        at = arguments.index(flag)
        del arguments[at : at + 2]
    assert complaint([*arguments, *more], capsys).startswith(said)


def test_without_an_environment_it_says_what_to_name(
    compiled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.VARIABLE, "/no/such/python")
    said = complaint(command(compiled), capsys)
    assert said.startswith(f"rebellions: sdk_missing: {environment.VARIABLE}: /no/such/python is")


def open_aborting() -> Sdk:
    """A card that aborts the process, as a driver's library may: at the third decode step of one
    position in a row.
    """
    fake, seen = FakeRebellions(), list[int]()
    begin = fake.card.begin_decode

    def abort(item: int, position: int, blocks: Any) -> None:
        seen.append(position)
        if seen[-3:] == [position] * 3:
            os.abort()
        begin(item, position, blocks)

    fake.card.begin_decode = abort  # type: ignore[method-assign]
    return fake.sdk()


@pytest.mark.usefixtures("asked")
def test_a_process_that_aborts_leaves_a_record_that_names_the_step(
    compiled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A real child, in which only the time of a step was not found out yet."""

    def reference_here(interpreter: str, module: str, arguments: list[str]) -> tuple[int, bytes]:
        if module == atom.REFERENCE_MODULE:
            return reference.main([*arguments, "--threads=1"]), b""
        return run_tied(interpreter, module, [*arguments, f"--sdk={MODULE}:open_aborting"])

    monkeypatch.setattr(atom, "run_tied", reference_here)
    out = tmp_path / "record.json"
    arguments = command(compiled, "--python", sys.executable, "--out", str(out))
    assert run_command(arguments) == 1
    said = capfd.readouterr().err.splitlines()
    assert "probe: round_trip" in said
    assert said[-1] == (
        f"headrace: the probe of device 0 ended with signal 6, and its record so far is {out}"
    )
    made = records.read(out, Record)
    assert made.unfinished == "costs"
    assert made.checkpoint == fingerprint(directory_of("llama"))
    assert usable(made, out, "").number_format == "declared"
