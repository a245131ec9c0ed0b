"""`headrace rngd`, and what `--source rngd` asks of `run`, `check` and `doctor`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import rngd_findings, run_command
from headrace.cli.check import CheckOptions, _asked, _attributes, _print
from headrace.cli.run import _config, _report
from headrace.cli.run_options import RunOptions
from headrace.engine import environment_making
from headrace.engine.environments import RNGD, PythonFacts
from headrace.engine.rngd.probes import COMPILER
from headrace.engine.text import ByteText
from headrace.errors import BackendUnavailable, Refused
from headrace.messages import Ended
from headrace.runtime.pairs import is_emulated
from headrace.runtime.router import RouteResult
from tests.unit.engine.fake_python import PIP_WORKS, write_fake_python
from tests.unit.engine.rngd.fake_site import write_fake_site

environments = import_module("headrace.engine.environments")

MODEL = Path("model")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(RNGD.variable, raising=False)
    monkeypatch.setattr(environment_making, "POLL_S", 0.01)
    return tmp_path / "cache"


@pytest.fixture
def fake_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The children of this test find fakes of the vendor's packages, and no card."""
    site = write_fake_site(tmp_path / "fake_site")
    with (site / "furiosa_smi.py").open("a") as smi:
        smi.write("cards, on_bus = [], 0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))


@pytest.fixture
def _suits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any Python suits, and the disk has room."""
    monkeypatch.setattr(environments, "check_python", lambda recipe, facts: None)
    monkeypatch.setattr(environments, "check_room", lambda recipe, directory: None)


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str], *, status: int = 2) -> str:
    assert run_command(arguments) == status
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("headrace: ")
    return line.removeprefix("headrace: ")


@pytest.mark.usefixtures("_suits")
def test_setup_says_before_what_it_downloads_and_how_big_it_is(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["rngd", "setup", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "furiosa-torch==2026.4.0, furiosa-kernels==2026.4.0" in said
    assert f"go into {cache / 'rngd-env'}" in said
    assert "About 4.3 GB are downloaded and 7.8 GB stay on disk" in said
    assert "aarch64-linux-gnu-gcc too, which is not installed by this" in said
    assert not cache.exists()


@pytest.mark.usefixtures("_suits", "fake_packages")
def test_setup_makes_what_is_found_afterwards(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = write_fake_python(tmp_path / "python", f"{PIP_WORKS}; echo once >> {tmp_path}/pip")
    assert run_command(["rngd", "setup", "--python", python]) == 0
    said = capsys.readouterr().err
    assert f"done: {cache / 'rngd-env' / 'bin' / 'python'}" in said
    assert RNGD.variable not in said
    assert environments.find(RNGD) == str(cache / "rngd-env" / "bin" / "python")
    assert run_command(["rngd", "setup", "--python", python]) == 0
    assert "is complete" in capsys.readouterr().err
    assert (tmp_path / "pip").read_text() == "once\n"


@pytest.mark.usefixtures("_suits", "fake_packages")
def test_setup_elsewhere_says_how_it_is_found(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, directory = write_fake_python(tmp_path / "python"), tmp_path / "elsewhere"
    command = ["rngd", "setup", "--python", python, "--directory", str(directory)]
    assert run_command(command) == 0
    assert f"set: HEADRACE_RNGD_PYTHON={directory}/bin/python" in capsys.readouterr().err
    assert not cache.exists()


@pytest.mark.usefixtures("_suits", "fake_packages")
def test_setup_is_not_done_before_it_was_seen_to_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake_site" / "furiosa" / "kernels" / "llama.py").write_text("")
    python = write_fake_python(tmp_path / "python")
    said = complaint(["rngd", "setup", "--python", python], capsys, status=1)
    assert said.startswith("all is installed, and it cannot be used: furiosa: api_missing: ")
    with pytest.raises(BackendUnavailable, match="was not finished"):
        environments.find(RNGD)


def test_setup_refuses_what_it_did_not_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    for dry in ([], ["--dry-run"]):
        said = complaint(["rngd", "setup", "--directory", str(tmp_path), *dry], capsys)
        assert "was not made by `headrace rngd setup`" in said


@pytest.mark.usefixtures("_suits", "fake_packages")
def test_an_environment_that_broke_is_made_anew(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every hint says to run the setup, which must not answer that all is there."""
    python = write_fake_python(tmp_path / "python", f"{PIP_WORKS}; echo once >> {tmp_path}/pip")
    setup = ["rngd", "setup", "--python", python]
    assert run_command(setup) == 0
    llama = tmp_path / "fake_site" / "furiosa" / "kernels" / "llama.py"
    good = llama.read_text()
    # Of another length: bytecode passes for current where time (in seconds) and size agree.
    llama.write_text(f"{good}raise ImportError('half of it is gone')")
    capsys.readouterr()
    assert run_command([*setup, "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert f"{cache / 'rngd-env'} cannot be used and is made anew: furiosa: api_missing" in said
    assert "About 4.3 GB are downloaded" in said
    assert environments.find(RNGD)  # nothing was done
    assert run_command(setup) == 1
    with pytest.raises(BackendUnavailable, match="was not finished"):
        environments.find(RNGD)
    llama.write_text(good)
    assert run_command(setup) == 0
    assert environments.find(RNGD)
    assert (tmp_path / "pip").read_text() == "once\n" * 3


@pytest.mark.usefixtures("fake_packages")
def test_a_mere_link_downloads_nothing_and_needs_no_room(
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python = write_fake_python(tmp_path / "python", f"{PIP_WORKS}; echo once >> {tmp_path}/pip")
    environment_making.make(RNGD, cache / "rngd-env", python)
    link = cache / "rngd-env" / "site" / "headrace"
    link.unlink()
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert run_command(["rngd", "setup", "--dry-run"]) == 0
    assert not link.is_symlink()
    assert run_command(["rngd", "setup"]) == 0
    said = capsys.readouterr().err
    assert "only this headrace is linked into it" in said
    assert "GB" not in said
    assert environments.find(RNGD)
    assert (tmp_path / "pip").read_text() == "once\n"


@pytest.mark.usefixtures("_suits", "fake_packages")
def test_what_pip_says_is_no_markup(cache: Path, tmp_path: Path) -> None:
    """A status parses what it is told, and a closing tag that nothing opened ends it."""
    python = write_fake_python(tmp_path / "python", "echo 'Collecting [/red]'; sleep 0.3")
    assert run_command(["rngd", "setup", "--python", python]) == 0


@pytest.mark.usefixtures("_suits")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["setup", "--directory", ""], "--directory is empty; name one, or leave it out"),
        (["setup", "--python", " "], "--python is empty"),
        (["probe", "--python", ""], "--python is empty"),
        (["compile", "--model", "m", "--python", ""], "--python is empty"),
        (["setup", "--directory", "/proc/env"], "nothing can be written to /proc/env"),
        (["setup", "--directory", "{file}"], "{file} is no directory"),
        (["setup", "--directory", "{file}/env"], "nothing can be written to {file}/env"),
        (["setup", "--directory", "{dangling}"], "{dangling} is no directory"),
        (["setup", "--directory", "{dangling}/env"], "nothing can be written to {dangling}/env"),
    ],
)
def test_what_cannot_be_a_place_or_a_python_is_refused_before_anything_is_said(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"file": tmp_path / "file", "dangling": tmp_path / "dangling"}
    names["file"].touch()
    names["dangling"].symlink_to("/nonexistent/place")
    assert run_command(["rngd", *(each.format(**names) for each in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headrace: {said.format(**names)}")


def test_setup_refuses_a_python_without_wheels(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = PythonFacts("/old/python", "cpython", (3, 10), "x86_64", "glibc 2.36", True)
    monkeypatch.setattr(environments, "look_at", lambda python: old)
    said = complaint(["rngd", "setup", "--python", "/old/python"], capsys)
    assert said.startswith("/old/python is cpython 3.10 and rngd needs CPython 3.11 to 3.14")
    assert not cache.exists()


PROBE = """#!/bin/sh
case "$*" in
*preflight*) exec {python} "$@" ;;
*) echo "$@" > {arguments}; echo working >&2; {does} ;;
esac
"""


@pytest.fixture
def probed(
    tmp_path: Path, fake_packages: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Names an interpreter whose probe does what the test says; returns where its arguments go."""

    def set_up(does: str) -> Path:
        python, arguments = tmp_path / "probed", tmp_path / "arguments"
        text = PROBE.format(python=sys.executable, arguments=arguments, does=does)
        python.write_text(text)
        python.chmod(0o755)
        monkeypatch.setenv(RNGD.variable, str(python))
        return arguments

    return set_up


def test_a_probe_tells_where_its_record_lies(
    probed: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    arguments = probed(f"touch {record}; echo a banner; echo {record}; echo freed 3 buffers; echo")
    assert run_command(["rngd", "probe", "--emulate"]) == 0
    assert capsys.readouterr().out == f"{record}\n"
    tied = "-m headrace.runtime.tied headrace.engine.rngd.probe"
    assert arguments.read_text() == f"{tied} --device=0 --chips=1 --emulate\n"
    assert run_command(["rngd", "probe", "--emulate", "--out", str(record)]) == 0
    assert capsys.readouterr().out == f"{record}\n"
    assert arguments.read_text().split()[-1] == f"--out={record}"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("exit 3", "the probe of emulated ended with exit status 3; it said why above"),
        ("kill -9 $$", "the probe of emulated ended with signal 9"),
        ("true", "the probe of emulated wrote no record"),
        ("echo /no/such/record", "the probe of emulated wrote no record"),
        ("printf '/a\\000b\\n'", "the probe of emulated wrote no record"),
    ],
)
def test_a_probe_that_failed_is_one_sentence(
    probed: Callable[[str], Path], capsys: pytest.CaptureFixture[str], does: str, said: str
) -> None:
    probed(does)
    assert complaint(["rngd", "probe", "--emulate"], capsys, status=1) == said


def test_a_probe_that_died_leaves_what_it_found(
    probed: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    probed(f"touch {record}; kill -ABRT $$")
    said = complaint(["rngd", "probe", "--emulate", "--out", str(record)], capsys, status=1)
    assert said.endswith(f"signal 6, and its record so far is {record}")


@pytest.mark.parametrize("status", [1, 2])
def test_what_a_probe_has_said_itself_is_not_said_again(
    probed: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    record = tmp_path / "record.json"
    probed(f"touch {record}; echo {record}; exit {status}")
    assert run_command(["rngd", "probe", "--emulate"]) == status
    shown = capsys.readouterr()
    assert shown.out == (f"{record}\n" if status == 1 else "")
    assert "headrace:" not in shown.err


def test_a_probe_begins_with_preflight(
    probed: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = probed("true")
    said = complaint(["rngd", "probe", "--device", "1"], capsys)
    assert said.startswith("furiosa: no_device: furiosa_smi.list_devices(): it is empty")
    assert not arguments.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "-1"], "--device is -1"),
        (["--out", "/"], "--out: / is a directory"),
        (["--chips", "3"], "--chips is 3; choose 1, 2 or 4"),
        ([], "furiosa: sdk_missing: environment: no environment in "),
    ],
)
def test_a_probe_that_makes_no_sense(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(["rngd", "probe", *arguments], capsys).startswith(said)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    (directory / "model.safetensors").write_bytes(bytes(8) + b"{}")
    return directory


@pytest.fixture
def _compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / COMPILER
    compiler.parent.mkdir()
    compiler.touch(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("_compiler")
def test_compiling_is_told_what_for(
    probed: Callable[[str], Path], model: Path, tmp_path: Path
) -> None:
    arguments = probed("true")
    assert run_command(["rngd", "compile", "--model", str(model)]) == 0
    tied = "-m headrace.runtime.tied headrace.engine.rngd.compile_ahead"
    assert arguments.read_text() == f"{tied} --model={model}\n"
    more = ["--max-positions", "64", "--token-buckets", "16", "--token-buckets", "32"]
    kept = ["--cache", str(tmp_path / "kernels")]
    assert run_command(["rngd", "compile", "--model", str(model), *more, *kept]) == 0
    assert arguments.read_text().endswith(
        f"--max-positions=64 --token-buckets 16 32 --cache={tmp_path / 'kernels'}\n"
    )


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    ("config", "broken", "works"),
    [
        ('{"model_type": "qwen3"}', "gemma4", True),
        ('{"model_type": "qwen3"}', "qwen3", False),
        ('{"model_type": "mamba"}', "gemma4", True),  # which the compiling child refuses
        ('{"model_type": ["qwen3"]}', "qwen3", True),
        ("[]", "qwen3", True),
        ("no json", "qwen3", True),
    ],
)
def test_compiling_needs_the_kernels_of_its_model_alone(
    probed: Callable[[str], Path],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: str,
    broken: str,
    works: bool,
) -> None:
    arguments = probed("true")
    (model / "config.json").write_text(config)
    (tmp_path / "fake_site" / "furiosa" / "kernels" / f"{broken}.py").write_text("")
    assert run_command(["rngd", "compile", "--model", str(model)]) == (0 if works else 2)
    assert arguments.exists() == works
    assert works or f"furiosa.kernels.{broken}" in capsys.readouterr().err


def test_compiling_without_a_compiler_ends_at_once(
    probed: Callable[[str], Path],
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = probed("true")
    monkeypatch.setenv("PATH", "/nonexistent")
    said = complaint(["rngd", "compile", "--model", str(model)], capsys)
    assert said.startswith(f"furiosa: toolchain_missing: {COMPILER}: not on PATH")
    assert not arguments.exists()


@pytest.mark.usefixtures("_compiler")
def test_compiling_that_failed_has_said_why(
    probed: Callable[[str], Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probed("exit 2")
    assert run_command(["rngd", "compile", "--model", str(model)]) == 2
    assert "headrace:" not in capsys.readouterr().err
    probed("kill -9 $$")
    said = complaint(["rngd", "compile", "--model", str(model)], capsys, status=1)
    assert said == "compiling ended with signal 9; what was done is kept"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-positions", "0"], "--max-positions is 0"),
        (["--token-buckets", "0"], "--token-buckets is 0"),
        ([], "furiosa: sdk_missing: environment: no environment in "),
    ],
)
def test_compiling_that_makes_no_sense(
    more: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(["rngd", "compile", "--model", str(model), *more], capsys).startswith(said)


OWN = ["--decoder", "null", "--prompt", "abc"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", *OWN, "--source", "replay", "--emulate"], "--emulate is for --source rngd, and"),
        (["run", *OWN, "--source", "a:b", "--emulate"], "--emulate is for --source rngd, and"),
        (
            ["run", *OWN, "--source", "rngd", "--dtype", "float32"],
            "--dtype is float32 and --source rngd computes in bfloat16; leave --dtype out",
        ),
        (["run", *OWN, "--source", "rngd"], "give --model; "),
        (
            ["check", "--source", "replay", "--decoder", "null", "--emulate"],
            "--emulate is for --source rngd, and it is replay",
        ),
        (
            ["check", "--source", "rngd", "--decoder", "null", "--dtype", "float16"],
            "--dtype is float16 and --source rngd computes in bfloat16",
        ),
        (["check", "--source", "rngd", "--decoder", "null"], "rngd needs --model"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(arguments, capsys).startswith(said)


def config(**options: Any) -> Any:
    return _config(RunOptions(**options), MODEL, 100, 4)


def test_run_starts_rngd_in_its_environment(
    monkeypatch: pytest.MonkeyPatch, other_python: str
) -> None:
    with pytest.raises(BackendUnavailable, match="no environment in"):
        config(source="rngd")
    monkeypatch.setenv(RNGD.variable, sys.executable)
    made = config(source="rngd", emulate=True)
    (source,) = made.sources
    assert source.python == sys.executable
    assert source.options == {
        "model": "model",
        "dtype": "bfloat16",
        "threads": 1,
        "emulate": True,
    }
    assert made.decoder_options["dtype"] == "bfloat16"
    (source,) = config(source="rngd", source_python=other_python).sources
    assert source.python == other_python
    assert "emulate" not in source.options


def test_a_source_with_another_headrace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho headrace 0.0.1\n")
    other.chmod(0o755)
    said = f"the headrace of {other} is 0.0.1, and this one is .* or give --source-python another"
    for source in ("rngd", "torch"):
        with pytest.raises(Refused, match=said):
            config(source=source, source_python=str(other))
    monkeypatch.setenv(RNGD.variable, str(other))
    with pytest.raises(Refused, match=said):
        config(source="rngd")


def test_other_sources_are_as_they_were() -> None:
    (source,) = config().sources
    assert source.python is None
    assert source.options == {"model": "model", "dtype": "float32", "threads": 1}
    assert config(dtype="bfloat16").sources[0].options["dtype"] == "bfloat16"


def test_check_starts_rngd_in_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(RNGD.variable, sys.executable)
    monkeypatch.setattr("headrace.engine.models.resolve", lambda name: tmp_path)
    options = CheckOptions(source="rngd", decoder="cpu", model="m", context=64)
    model = {"model": str(tmp_path), "dtype": "bfloat16", "threads": 1}
    made = _attributes(options)
    assert made["source_python"] == sys.executable
    assert made["source_options"] == made["decoder_options"] == model
    made = _attributes(replace(options, emulate=True, share_device=True))
    assert made["source_options"] == model | {"emulate": True, "share_device": True}
    assert made["decoder_options"] == model
    asked = _asked(replace(options, emulate=True), 64)
    assert asked["dtype"] == "bfloat16"
    assert "--emulate" in asked["command"]
    assert "--dtype" not in asked["command"]


EMULATED = '{"emulate": true}'


@pytest.mark.parametrize(
    ("options", "emulated"),
    [
        ({"emulate": True}, True),
        ({"source_options": EMULATED}, True),
        ({"emulate": True, "source_options": '{"emulate": false}'}, False),
        ({}, False),
        ({"source": "torch", "source_options": EMULATED}, False),
    ],
)
def test_an_emulated_pair_is_called_so(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any], emulated: bool
) -> None:
    """Whichever option asked for it, and in each form of what is told."""
    given = CheckOptions(**{"source": "rngd", "decoder": "cpu", **options})
    asked = _asked(given, 64)
    assert asked["emulate"] is emulated
    report = {"cases": [], "passed": True, "verdict": "all held", "seconds": 1.0}
    _print(Console(width=100), report, given, pair=asked["pair"])
    mark = " (emulated)" if emulated else ""
    assert f"{given.source}{mark} -> cpu: all held" in capsys.readouterr().out
    stamp = {"commit": "", "dirty": False, "headrace": "", "cpu": "", "cpus": 1, "python": ""}
    written = {
        **report,
        "asked": asked,
        "stamp": {**stamp, "packages": {}},
        "platform": {"system": ""},
        "source": {},
        "decoder": {},
    }
    title = next(iter(import_module("headrace.testing.pair.report")._markdown(written)))
    assert title == f"# headrace check: {given.source}{mark} -> cpu"


@pytest.mark.parametrize("options", [{"emulate": True}, {"source_options": EMULATED}, {}])
@pytest.mark.parametrize("as_text", [True, False])
def test_run_says_that_it_was_emulated(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any], as_text: bool
) -> None:
    ended = Ended(0, "finished", "", "", None, "", (), "", (), None)
    result = RouteResult([], ended, [], [])
    given = RunOptions(source="rngd", route="streamed", json=not as_text, **options)
    source_options = {"emulate": given.emulate} | json.loads(given.source_options)
    emulated = is_emulated("rngd", source_options)
    marks = {"emulated": emulated, "fake": False}
    assert _report(given, ByteText(), [1], {"streamed": result}, marks) == 0
    shown = capsys.readouterr()
    if as_text:
        assert ("rngd (emulated) -> cpu" in shown.err) is bool(options)
    else:
        assert json.loads(shown.out)["emulated"] is bool(options)


def test_doctor_says_how_to_have_it() -> None:
    finding = rngd_findings.find_environment()
    assert finding.status == "note"
    assert finding.found.startswith("sdk_missing: environment: no environment in ")
    assert finding.advice.startswith("Run: headrace rngd setup")
    assert finding.facts == {"stage": "sdk_missing"}
    assert rngd_findings.find_card().status == "note"


@pytest.mark.usefixtures("fake_packages")
def test_doctor_tells_emulation_and_a_card_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RNGD.variable, sys.executable)
    finding = rngd_findings.find_environment()
    assert (finding.status, finding.facts) == ("ok", {"interpreter": sys.executable})
    finding = rngd_findings.find_card()
    assert (finding.status, finding.facts) == ("note", {"stage": "no_device"})


@pytest.mark.usefixtures("fake_packages")
def test_doctor_types_what_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_site" / "torch" / "__init__.py").write_text("__version__ = '2.13.0'")
    monkeypatch.setenv(RNGD.variable, sys.executable)
    finding = rngd_findings.find_environment()
    assert finding.status == "note"
    assert finding.facts == {"interpreter": sys.executable, "stage": "torch_mismatch"}


def test_a_usable_card_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = write_fake_site(tmp_path / "fake_site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
    (tmp_path / "aarch64-linux-gnu-gcc").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(RNGD.variable, sys.executable)
    finding = rngd_findings.find_card()
    assert finding.status == "ok"
    assert "furiosa_smi.list_devices(): npu0, npu1" in finding.found
