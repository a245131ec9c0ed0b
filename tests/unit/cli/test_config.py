"""`headrace config`: what a file comes to, and all that it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli import run_command
from headrace.cli.config import line_of
from headrace.server.config import DecoderTable, ServeConfig, SourceTable
from headrace.server.config_checks import CheckedDecoder
from headrace.server.config_file import parse_config
from headrace.server.owner_configs import owner_config
from headrace.server.sizes import Sizes
from tests.unit.server.model_directory import model_directory


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = model_directory(tmp_path / "model")
    path = tmp_path / "headrace.toml"
    path.write_text(f"[[decoders]]\nmodel = '{model}'\ncontext = 64\nlanes = 1\nthreads = 4096\n")
    return path


def test_check_prints_a_line_for_each_decoder(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [Sizes(1000, 2000, 1000, 4000, 0)]
    monkeypatch.setattr("headrace.server.config_checks.measured", lambda tables, lanes: sizes)
    assert run_command(["config", "check", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert out.startswith(
        f"cpu: {file.parent / 'model'} by torch -> cpu: 1 lane and 2 slots take 5.0 kB"
    )
    assert out.endswith("; ready to serve\n")
    assert err.startswith("headrace: warning: decoders and sources have 4097 threads in all")


def test_check_refuses_with_one_sentence(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text() + "lane = 3\n")
    assert run_command(["config", "check", str(file)]) == 2
    said = capsys.readouterr().err
    assert said == (f"headrace: {file}: unknown key `lane` in decoders[0]; did you mean `lanes`?\n")


def test_check_says_of_which_file_it_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text().replace("context = 64", "context = 1000000"))
    assert run_command(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"headrace: {file}: decoders[0].context is 1000000")


def test_show_fills_in_the_defaults(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "show", str(file)]) == 0
    text = capsys.readouterr().out
    assert "# The port; 0 takes a free one. (a count from 0 to 65535)\nport = 8000\n" in text
    assert parse_config(text, "f") == parse_config(file.read_text(), "f")
    file.write_text(text)
    assert run_command(["config", "show", str(file)]) == 0
    assert capsys.readouterr().out == text


def test_show_without_a_file_prints_one_to_begin_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "show"]) == 0
    assert parse_config(capsys.readouterr().out, "f").decoders[0].model == "smollm2-135m"


def test_a_line_says_what_a_decoder_takes() -> None:
    table = DecoderTable(model="m", name="x", sources=(SourceTable(slots=1),))
    start = owner_config(table, ServeConfig(decoders=(table,)), Path("/m"))
    known = CheckedDecoder("x", table, 4, start, Sizes(1000, 2000, 4000, 2000, 10**9))
    assert line_of(known) == (
        "x: m by torch -> cpu: 4 lanes and 1 slot take 6.0 kB here (1.0 kB a lane, 2.0 kB a slot), "
        "weights up to 1.0 GB; ready to serve"
    )
    unknown = known._replace(sizes=None, lanes=1)
    assert line_of(unknown).endswith(
        "1 lane and 1 slot, of sizes that its options decide; ready to serve"
    )
    some = known._replace(unchecked=("the options of a:b", "the device of cuda"))
    assert line_of(some).endswith("; not checked: the options of a:b, the device of cuda")
