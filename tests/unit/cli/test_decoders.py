"""What `--decoder` decides of the other options, for `headrace run` and `headrace check`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from headrace.backends import atom
from headrace.backends.load import DECODERS, ONE_LANE, open_decoder
from headrace.backends.options import read_options
from headrace.cli import run_command
from headrace.cli.check import CheckOptions
from headrace.cli.run_options import RunOptions
from headrace.engine.text import ByteText
from headrace.errors import BackendUnavailable, PeerDied
from headrace.messages import Ended
from headrace.runtime.pairs import LANES, interpreter_for_decoder, is_fake, options_of, pair_name
from headrace.runtime.router import RouteResult

check = import_module("headrace.cli.check")  # the names in the package are the commands
run = import_module("headrace.cli.run")

RUN = ["run", "--source", "replay", "--prompt", "abc", "--decoder"]
CHECK = ["check", "--source", "replay", "--decoder"]
FAKE = {"sdk": "fake"}
CHECKPOINT = Path("model")


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence of a mistake."""
    assert run_command(arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("headrace: ")
    assert text.count("\n") == 1
    return text.removeprefix("headrace: ").strip()


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    directory = tmp_path / "compiled"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("command", [RUN, CHECK])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["atom"], "--decoder atom needs --compiled DIR"),
        (["atom", "--compiled", "/nowhere"], "--compiled: /nowhere is not a directory"),
        (["atom", "--compiled", "."], "give --model|atom needs --model"),
        (["atom", "--decoder-options", '{"compiled": "."}'], "give --model|atom needs --model"),
        (
            ["atom", "--compiled", ".", "--decoder-options", '{"compiled": "."}'],
            "--compiled is given and compiled in --decoder-options; leave one out",
        ),
        (["cpu", "--compiled", "."], "--compiled is for --decoder atom, and it is cpu"),
        (["null", "--compiled", "."], "--compiled is for --decoder atom, and it is null"),
        (["a:b", "--compiled", "."], "--compiled is for --decoder atom, and it is a:b"),
        (["cpu"], "give --model|cpu needs --model"),
        (["cuda"], "give --model|cuda needs --model"),
        (["null", "--decoder-options", "[]"], "--decoder-options is not a JSON object"),
    ],
)
def test_what_makes_no_sense_is_refused(
    command: list[str], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = complaint([*command, *arguments], capsys)
    assert any(told.startswith(each) for each in said.split("|")), told


def test_how_a_compiled_directory_is_made_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (RUN, CHECK):
        assert "docs/atom.md says how" in complaint([*command, "atom"], capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lanes", "2"], "--lanes is 2 and --decoder atom has one lane; leave --lanes out"),
        (["--lanes", str(LANES)], f"--lanes is {LANES} and --decoder atom has one lane"),
        (["--decode-batch", "2"], "--decode-batch is 2 and --decoder atom decodes one sequence"),
    ],
)
def test_one_lane_is_all_that_atom_has(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = complaint([*RUN, "atom", "--compiled", ".", *arguments], capsys)
    assert told.startswith(said)
    for allowed in ([], ["--lanes", "1"], ["--decode-batch", "1"]):
        told = complaint([*RUN, "atom", "--compiled", ".", *allowed], capsys)
        assert told.startswith("give --model; ")


@pytest.mark.parametrize("batch", ["4", '"many"', "0"])
def test_a_batch_in_the_options_is_compared_neither(
    batch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--route", "compare", "--decoder-options", f'{{"decode_batch": {batch}}}']
    assert "leave --decode-batch out" in complaint([*RUN, "module:own", *options], capsys)


def config(**options: Any) -> Any:
    return run._config(RunOptions(**options), CHECKPOINT, 100, 4)


def test_run_passes_what_each_decoder_takes(compiled: Path) -> None:
    model = {"model": "model", "dtype": "float32", "threads": 1}
    assert config(decoder="cpu").decoder_options == {**model, "lanes": LANES, "context": 64}
    assert config(decoder="cpu", lanes=2).decoder_options["lanes"] == 2
    assert config(decoder="null").decoder_options == {"lanes": LANES, "context": 64}
    given = json.dumps({"device": 1, "lossy": True})
    made = config(decoder="atom", compiled=compiled, decoder_options=given).decoder_options
    assert made == {
        **model,
        "compiled": str(compiled),
        "context": 64,
        "device": 1,
        "lossy": True,
    }
    assert read_options(made, atom.Options, "atom").device == 1
    assert config(decoder="a:b", decoder_options='{"context": 9}').decoder_options["context"] == 9


def test_a_relative_directory_is_found_by_a_process_that_works_elsewhere(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(compiled.parent)
    assert options_of("atom", {}, compiled=Path("compiled"))["compiled"] == str(compiled)


def test_check_passes_what_each_decoder_takes(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headrace.engine.models.resolve", lambda name: tmp_path)
    model = {"model": str(tmp_path), "dtype": "float32", "threads": 1}
    options = CheckOptions(source="torch", decoder="cpu", model="m", context=64)
    assert check._attributes(options)["decoder_options"] == model
    shared = replace(options, share_device=True)
    assert check._attributes(shared)["decoder_options"] == model
    shared = replace(shared, decoder="atom", compiled=compiled)
    made = check._attributes(shared)["decoder_options"]
    assert made == {**model, "compiled": str(compiled), "share_device": True}
    asked = check._asked(shared, 64)
    assert f"--compiled {compiled}" in asked["command"]
    assert asked["pair"] == "torch -> atom"
    assert check._attributes(replace(options, decoder="null"))["decoder_options"] == {}


class Environment(ModuleType):
    """The vendor's environment, or none."""

    found: str | None = "/opt/vendor/bin/python"

    def find(self) -> str:
        if self.found is None:
            raise BackendUnavailable("rebellions", "sdk_missing", "environment", "none", "Get it")
        return self.found


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Environment:
    made = Environment("environment")
    monkeypatch.setattr("headrace.runtime.pairs.environment", made)
    return made


def test_the_interpreter_of_a_decoder(environment: Environment) -> None:
    for decoder in ("cpu", "cuda", "null", "a:b"):
        assert interpreter_for_decoder(decoder, None, {}) is None
        assert interpreter_for_decoder(decoder, "/a/python", {}) == "/a/python"
    assert interpreter_for_decoder("atom", None, {}) == environment.found
    assert interpreter_for_decoder("atom", "/a/python", {}) == "/a/python"
    assert interpreter_for_decoder("atom", "/a/python", FAKE) == "/a/python"
    environment.found = None
    with pytest.raises(BackendUnavailable, match="sdk_missing"):
        interpreter_for_decoder("atom", None, {})
    assert interpreter_for_decoder("atom", None, FAKE) is None


def test_this_interpreter_needs_no_other_process(environment: Environment) -> None:
    environment.found = sys.executable
    assert interpreter_for_decoder("atom", None, {}) is None
    assert interpreter_for_decoder("cpu", sys.executable, {}) is None


def test_a_fake_is_called_so_wherever_a_figure_is_shown() -> None:
    assert is_fake("atom", FAKE)
    assert not is_fake("atom", {})
    assert not is_fake("a:b", FAKE)
    assert pair_name("torch", "atom", emulated=False, fake=True) == "torch -> atom (fake)"
    assert pair_name("rngd", "atom", emulated=True, fake=True) == "rngd (emulated) -> atom (fake)"
    assert pair_name("torch", "atom", emulated=False, fake=False) == "torch -> atom"


@pytest.mark.parametrize("options", [FAKE, {}])
def test_check_says_that_it_was_fake(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given = CheckOptions(source="torch", decoder="atom", decoder_options=json.dumps(options))
    asked = check._asked(given, 64)
    assert asked["fake"] is bool(options)
    name = "torch -> atom (fake)" if options else "torch -> atom"
    report = {"cases": [], "passed": True, "verdict": "all held", "seconds": 1.0}
    check._print(Console(width=100), report, given, pair=asked["pair"])
    assert f"{name}: all held" in capsys.readouterr().out
    stamp = {"commit": "", "dirty": False, "headrace": "", "cpu": "", "cpus": 1, "python": ""}
    facts = {"stamp": {**stamp, "packages": {}}, "platform": {"system": ""}}
    written = {**report, **facts, "asked": asked, "source": {}, "decoder": {}}
    written["source"] = written["decoder"] = {"layers": {}}
    title = next(iter(import_module("headrace.testing.pair.report")._markdown(written)))
    assert title == f"# headrace check: {name}"


@pytest.mark.parametrize("options", [FAKE, {}])
@pytest.mark.parametrize("as_text", [True, False])
def test_run_says_that_it_was_fake(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any], as_text: bool
) -> None:
    result = RouteResult([], Ended(0, "finished", "", "", None, "", (), "", (), None), [], [])
    given = {"source": "torch", "decoder": "atom", "decoder_options": json.dumps(options)}
    made = RunOptions(route="streamed", json=not as_text, **given)  # type: ignore[arg-type]
    marks = run._marks(config(**given))
    assert run._report(made, ByteText(), [1], {"streamed": result}, marks) == 0
    shown = capsys.readouterr()
    if as_text:
        assert ("torch -> atom (fake)" in shown.err) is bool(options)
    else:
        told = json.loads(shown.out)
        assert (told["fake"], told["emulated"]) == (bool(options), False)


class Elsewhere:
    """Stands for the process in another environment."""

    def __init__(self, said: list[Any], answer: dict[str, Any] | None) -> None:
        self.said = said
        self.answer = answer
        self.call: tuple[str, str, dict[str, Any]] | None = None

    def __call__(self, interpreter: str, target: str, asked: Any, *, told: Any) -> Any:
        self.call = interpreter, target, json.loads(json.dumps(asked))
        for each in self.said:
            told(each)
        if self.answer is None:
            raise PeerDied("it died")
        return self.answer


def checked(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Elsewhere, **options: Any
) -> tuple[dict[str, Any], list[str]]:
    """The report of a check in another environment, and the cases that were told of meanwhile."""
    monkeypatch.setattr("headrace.runtime.elsewhere.call", elsewhere)
    given = CheckOptions(
        source="replay", decoder="null", decoder_python="/a/python", only=("facts",), **options
    )
    told: list[str] = []
    report = check._run(
        given,
        check._attributes(given),
        lambda what, case: told.append(f"{what} {case['case']}"),
        lambda report: None,
    )
    return report, told


def test_a_check_in_another_environment(monkeypatch: pytest.MonkeyPatch, other_python: str) -> None:
    case = {"case": "facts"}
    elsewhere = Elsewhere([["begin", case], ["end", case]], {"passed": True})
    assert checked(monkeypatch, elsewhere) == ({"passed": True}, ["begin facts", "end facts"])
    assert elsewhere.call is not None
    interpreter, target, asked = elsewhere.call
    assert interpreter == "/a/python"
    module, _, function = target.partition(":")
    assert callable(getattr(import_module(module), function))
    assert (asked["only"], asked["repeat"]) == (["facts"], 1)
    assert asked["attributes"]["source_python"] == sys.executable  # and not the decoder's
    checked(monkeypatch, elsewhere, source_python=other_python)
    assert elsewhere.call[2]["attributes"]["source_python"] == other_python


def test_a_check_that_hangs_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite tells what it has and ends its process, which is the only way out of the call."""
    report = {"passed": False}
    assert checked(monkeypatch, Elsewhere([["hung", report]], None)) == (report, [])
    with pytest.raises(PeerDied):
        checked(monkeypatch, Elsewhere([], None))


def test_where_atom_cannot_run_it_says_how_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DECODERS["atom"] == "headrace.backends.atom:open"
    assert "atom" in ONE_LANE
    monkeypatch.setitem(sys.modules, "headrace.backends.atom", None)
    with pytest.raises(BackendUnavailable, match="HEADRACE_ATOM_PYTHON or with --decoder-python"):
        open_decoder("atom", {})
