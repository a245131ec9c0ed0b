from __future__ import annotations

from headrace.cli import environment_setup


def test_long_lines_of_pip_are_cut() -> None:
    assert environment_setup._short("x" * 72) == "x" * 72
    assert environment_setup._short("x" * 73) == "x" * 69 + "..."
