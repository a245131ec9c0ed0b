"""The script's entry: what it says where the command line's packages are missing."""

from __future__ import annotations

import sys

import pytest

from headrace import __main__ as entry


def forget_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("headrace.cli")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("package", ["cyclopts", "rich"])
def test_without_its_packages_it_says_what_to_install(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_cli(monkeypatch)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    complaint = capsys.readouterr().err
    assert package in complaint
    assert "pip install 'headrace[cpu]'" in complaint
    assert complaint.count("\n") == 1


def test_a_broken_installation_of_headrace_is_not_explained_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_cli(monkeypatch)
    monkeypatch.setitem(sys.modules, "headrace.cli", None)
    with pytest.raises(ModuleNotFoundError):
        entry.main()


def test_it_runs_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "models", "list"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 0
    assert "smollm2-135m" in capsys.readouterr().out
