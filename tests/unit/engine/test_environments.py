from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import environment_making
from headrace.engine.environment_making import give_up, make
from headrace.engine.environments import (
    LOCK,
    MARKER,
    PACKAGE,
    RNGD,
    PythonFacts,
    check_directory,
    check_python,
    check_room,
    check_writable,
    find,
    interpreter_in,
    is_complete,
    lacks_only_a_link,
    look_at,
)
from headrace.errors import BackendUnavailable, HeadraceError, Refused
from tests.unit.engine.fake_python import (
    PIP_WORKS,
    with_a_quick_venv,
    write_fake_python,
    write_wheel,
)

GOOD = PythonFacts("python9", "cpython", (3, 12), "x86_64", "glibc 2.36", True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(RNGD.variable, raising=False)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_making, "POLL_S", 0.01)


def directory_of(cache: Path) -> Path:
    return cache / "rngd-env"


def marker_in(directory: Path) -> Any:
    return json.loads((directory / MARKER).read_text())


def unavailable() -> str:
    with pytest.raises(BackendUnavailable) as caught:
        find(RNGD)
    assert (caught.value.vendor, caught.value.stage) == ("furiosa", "sdk_missing")
    assert "Run: headrace rngd setup" in caught.value.hint
    return caught.value.detail


def test_what_was_made_is_found(cache: Path, tmp_path: Path) -> None:
    assert unavailable() == f"no environment in {directory_of(cache)}"
    interpreter = make(RNGD, directory_of(cache), write_fake_python(tmp_path / "python"))
    assert find(RNGD) == interpreter == str(interpreter_in(directory_of(cache)))
    assert is_complete(RNGD, directory_of(cache))


def test_the_variable_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RNGD.variable, sys.executable)
    assert find(RNGD) == sys.executable
    monkeypatch.setenv(RNGD.variable, str(tmp_path / "nothing"))
    assert unavailable() == f"{tmp_path / 'nothing'} is no program that can be run"


def test_all_lies_in_the_directory(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's temporary files are gigabytes, and its cache would stay for good."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    for name in ("PIP_TARGET", "PIP_PYTHON", "PIP_DRY_RUN", "PIP_NO_DEPS"):
        monkeypatch.setenv(name, "/elsewhere")
    leaked = "$PYTHONPATH$PIP_TARGET$PIP_PYTHON$PIP_DRY_RUN$PIP_NO_DEPS"
    pip = f'{PIP_WORKS}; echo "{leaked}" > leaked; echo "$PIP_INDEX_URL" > index'
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple")
    directory = directory_of(cache)
    lines: list[str] = []
    make(RNGD, directory, write_fake_python(tmp_path / "python", pip), told=lines.append)
    assert (directory / "leaked").read_text() == "\n"
    assert (directory / "index").read_text() == "https://index.invalid/simple\n"
    asked = (directory / "pip-arguments").read_text().split()
    assert asked[:3] == ["-m", "pip", "install"]
    assert asked[-len(RNGD.requirements) :] == list(RNGD.requirements)
    assert {"--no-cache-dir", "--only-binary=:all:", "--no-input"} <= set(asked)
    assert (directory / "pip-temporary").read_text() == f"{directory / 'temporary'}\n"
    assert not (directory / "temporary").exists()
    assert lines[0] == "making the environment"


def test_headrace_itself_is_linked_and_nothing_beside_it(cache: Path, tmp_path: Path) -> None:
    directory = directory_of(cache)
    make(RNGD, directory, write_fake_python(tmp_path / "python"))
    site = directory / "site"
    assert [path.name for path in site.iterdir()] == ["headrace"]
    assert (site / "headrace").resolve() == PACKAGE.resolve()
    assert (site / "headrace" / "version.py").is_file()


def test_another_headrace_is_linked_anew_and_nothing_is_installed(
    cache: Path, tmp_path: Path
) -> None:
    directory, python = directory_of(cache), write_fake_python(tmp_path / "python")
    make(RNGD, directory, python)
    link = directory / "site" / "headrace"
    link.unlink()
    link.symlink_to(tmp_path)
    assert unavailable() == f"{directory} is linked to another headrace than {PACKAGE}"
    assert lacks_only_a_link(RNGD, directory)
    (directory / "pip-arguments").unlink()
    make(RNGD, directory, python)
    assert find(RNGD)
    assert not lacks_only_a_link(RNGD, directory)
    assert not (directory / "pip-arguments").exists()


def test_a_headrace_that_somebody_installed_there_is_replaced(cache: Path, tmp_path: Path) -> None:
    directory, python = directory_of(cache), write_fake_python(tmp_path / "python")
    make(RNGD, directory, python)
    link = directory / "site" / "headrace"
    link.unlink()
    link.mkdir()
    (link / "__init__.py").touch()
    assert unavailable() == f"{directory} is linked to another headrace than {PACKAGE}"
    make(RNGD, directory, python)
    assert find(RNGD)
    assert link.resolve() == PACKAGE.resolve()


def test_a_link_that_cannot_be_proven_is_not_finished(cache: Path, tmp_path: Path) -> None:
    directory, python = directory_of(cache), write_fake_python(tmp_path / "python")
    make(RNGD, directory, python)
    (directory / "site" / "headrace").unlink()

    def prove(interpreter: str) -> None:
        raise HeadraceError("no")

    with pytest.raises(HeadraceError, match="no"):
        make(RNGD, directory, python, prove=prove)
    assert unavailable() == f"the setup of {directory} was not finished"
    assert not lacks_only_a_link(RNGD, directory)


def test_what_is_given_up_is_made_anew(cache: Path, tmp_path: Path) -> None:
    directory, python = directory_of(cache), write_fake_python(tmp_path / "python")
    make(RNGD, directory, python)
    (directory / "left").touch()
    give_up(RNGD, directory)
    assert unavailable() == f"the setup of {directory} was not finished"
    make(RNGD, directory, python)
    assert find(RNGD)
    assert not (directory / "left").exists()


def test_an_environment_of_other_versions_is_made_anew(cache: Path, tmp_path: Path) -> None:
    directory, python = directory_of(cache), write_fake_python(tmp_path / "python")
    make(replace(RNGD, requirements=("furiosa-torch==1.0",)), directory, python)
    assert unavailable() == f"{directory} was made for other versions"
    (directory / "left").touch()
    make(RNGD, directory, python)
    assert find(RNGD)
    assert not (directory / "left").exists()


def test_an_environment_whose_python_is_gone_is_made_anew(cache: Path, tmp_path: Path) -> None:
    directory, python = directory_of(cache), write_fake_python(tmp_path / "python")
    interpreter = Path(make(RNGD, directory, python))
    interpreter.unlink()
    interpreter.symlink_to(tmp_path / "uninstalled")
    assert unavailable() == f"{interpreter} is gone"
    make(RNGD, directory, python)
    assert find(RNGD)


@pytest.mark.parametrize(
    ("pip", "said"),
    [
        (
            "echo 'ERROR: No matching distribution found for furiosa-torch'; echo later; exit 1",
            "pip failed: No matching distribution found for furiosa-torch (all it said is in ",
        ),
        ("echo; echo 'a traceback ended'; exit 2", "pip failed: a traceback ended (all it said"),
        ("exit 1", "pip failed: it printed nothing (all it said"),
        ("kill -9 $$", "pip failed: it printed nothing (all it said"),
    ],
)
def test_a_failed_pip_is_one_sentence(cache: Path, tmp_path: Path, pip: str, said: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        make(RNGD, directory_of(cache), write_fake_python(tmp_path / "python", pip))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert unavailable() == f"the setup of {directory_of(cache)} was not finished"
    make(RNGD, directory_of(cache), write_fake_python(tmp_path / "python"))
    assert find(RNGD)


def test_a_failed_venv_is_one_sentence(cache: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ensurepip is not available'\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(HeadraceError, match=r"^venv failed: ensurepip is not available"):
        make(RNGD, directory_of(cache), str(python))


def test_what_cannot_be_proven_is_not_finished(cache: Path, tmp_path: Path) -> None:
    def prove(interpreter: str) -> None:
        raise HeadraceError(f"not with {interpreter}")

    with pytest.raises(HeadraceError, match="not with"):
        make(RNGD, directory_of(cache), write_fake_python(tmp_path / "python"), prove=prove)
    assert unavailable() == f"the setup of {directory_of(cache)} was not finished"


@contextmanager
def held_at_pip(directory: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A setup in a process of its own whose pip waits; it is ended with its pip."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    os.mkfifo(begun)
    os.mkfifo(go)
    python = write_fake_python(tmp_path / "held", f"echo $$ > {begun}; read line < {go}")
    code = (
        "import sys; from pathlib import Path; from headrace.engine.environments import RNGD;"
        "from headrace.engine.environment_making import make;"
        "make(RNGD, Path(sys.argv[1]), sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(directory), python]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as setup:
        pip = int(begun.read_text())
        pidfd = os.pidfd_open(pip)
        try:
            yield setup
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            setup.kill()


def test_a_killed_setup_leaves_nothing_that_counts(cache: Path, tmp_path: Path) -> None:
    """Its pip goes on, and as long as it does nobody else begins; then all is made anew."""
    directory, python = directory_of(cache), write_fake_python(tmp_path / "python")
    with held_at_pip(directory, tmp_path) as setup:
        assert unavailable() == f"the setup of {directory} was not finished"
        with pytest.raises(Refused, match="another setup is at work"):
            make(RNGD, directory, python)
        setup.kill()
        setup.wait()
        assert marker_in(directory)["complete"] is False
        with pytest.raises(Refused, match="another setup is at work"):
            make(RNGD, directory, python)
        (directory / "half").touch()
    _wait_until_free(directory)
    make(RNGD, directory, python)
    assert find(RNGD)
    assert not (directory / "half").exists()


def _wait_until_free(directory: Path) -> None:
    """Wait for the end of what holds the lock: a killed child's end is not ours to reap."""
    with (directory / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def test_an_interrupted_setup_ends_its_pip(cache: Path, tmp_path: Path) -> None:
    directory = directory_of(cache)
    with held_at_pip(directory, tmp_path) as setup:
        setup.send_signal(signal.SIGINT)
        assert setup.wait() != 0
        _wait_until_free(directory)
    assert unavailable() == f"the setup of {directory} was not finished"


@pytest.mark.parametrize("name", ["file", MARKER, LOCK])
def test_a_directory_that_setup_did_not_make_is_refused(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    check_directory(RNGD, directory)  # an empty one is as good as none
    (directory / name).write_text('{"recipe": "another"}')
    (directory / "precious").touch()
    with pytest.raises(Refused, match="was not made by `headrace rngd setup`"):
        make(RNGD, directory, "/no/python")
    assert {path.name for path in directory.iterdir()} == {name, "precious"}


@pytest.mark.parametrize("text", ["", "no json", "[1]", "null"])
def test_a_broken_marker_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(Refused, match="was not made by"):
        check_directory(RNGD, tmp_path)
    assert not is_complete(RNGD, tmp_path)


def test_a_setup_that_was_killed_at_once_is_no_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / f"{MARKER}.new").touch()
    check_directory(RNGD, tmp_path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("file", "dangling"):
        with pytest.raises(Refused, match="is no directory"):
            check_directory(RNGD, tmp_path / name)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for parent in (tmp_path / "file", tmp_path / "dangling", Path("/proc")):
        check_directory(RNGD, parent / "a" / "b")
        with pytest.raises(Refused, match=r"nothing can be written to .*; name another with"):
            check_writable(parent / "a" / "b")
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "dangling"}


def test_a_full_disk_is_found_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=RNGD.room_nbytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(Refused, match=r"needs 12\.1 GB in .* where 12\.1 GB are free; make room"):
        check_room(RNGD, tmp_path / "not" / "there")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=RNGD.room_nbytes))
    check_room(RNGD, tmp_path)


def test_what_a_killed_setup_left_counts_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=RNGD.room_nbytes - 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    (tmp_path / "env" / "lib").mkdir(parents=True)
    with pytest.raises(Refused, match="make room"):
        check_room(RNGD, tmp_path / "env")
    (tmp_path / "env" / "lib" / "big.so").write_bytes(bytes(1_100_000))
    check_room(RNGD, tmp_path / "env")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": (3, 10)}, "is cpython 3.10 and rngd needs CPython 3.11 to 3.14"),
        ({"version": (3, 15)}, "is cpython 3.15 and rngd needs CPython 3.11 to 3.14"),
        ({"implementation": "pypy"}, "is pypy 3.12 and rngd needs CPython"),
        ({"machine": "riscv64"}, "for Linux on x86_64 and aarch64, and this is Linux on riscv64"),
        ({"libc": "glibc 2.31"}, "needs glibc 2.34 or newer, and python9 runs on glibc 2.31"),
        ({"libc": ""}, "python9 runs on another C library"),
        ({"makes_environments": False}, "apt install python3.12-venv"),
    ],
)
def test_a_python_that_the_vendor_has_no_wheels_for(changed: dict[str, Any], said: str) -> None:
    check_python(RNGD, GOOD)
    with pytest.raises(Refused) as caught:
        check_python(RNGD, replace(GOOD, **changed))
    assert said in str(caught.value)


def test_this_python_is_looked_at() -> None:
    facts = look_at(sys.executable)
    assert facts.version == sys.version_info[:2]
    assert facts.implementation == sys.implementation.name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#!/bin/sh\nexit 3\n",
        "#!/bin/sh\necho '[]'\n",
        "#!/bin/sh\necho 7\n",
        """#!/bin/sh\necho '["cpython", ["3", "11"], "x86_64", "glibc 2.36", true]'\n""",
        """#!/bin/sh\necho '["cpython", [3, 11], "x86_64", 2.36, true]'\n""",
    ],
)
def test_what_is_no_python_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(0o755 if text else 0o644)
    with pytest.raises(Refused, match="is no Python that runs here"):
        look_at(str(path))


def test_a_real_environment_of_a_small_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps themselves, with a real venv and a real pip, and without a network."""
    write_wheel(tmp_path, "a-small-one")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    recipe = replace(RNGD, name="small", requirements=("a-small-one==1.0",))
    interpreter = make(recipe, tmp_path / "env", with_a_quick_venv(tmp_path))
    code = "import a_small_one, headrace.errors; print(a_small_one.__file__, headrace.__file__)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([interpreter, "-c", code], env=env, capture_output=True, text=True)
    small, ours = done.stdout.split()
    assert small.startswith(str(tmp_path / "env"))
    assert Path(ours).resolve() == (PACKAGE / "__init__.py").resolve()
