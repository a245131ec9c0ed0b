"""What is refused of another environment's interpreter, each in one sentence."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import Refused
from headrace.runtime import interpreters
from headrace.runtime.interpreters import check_interpreter
from headrace.version import VERSION

FLAG = "--decoder-python"


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def refusal(interpreter: str) -> str:
    with pytest.raises(Refused) as caught:
        check_interpreter(interpreter, FLAG)
    text = str(caught.value)
    assert caught.value.field == "interpreter"
    assert interpreter in text
    assert FLAG in text
    assert "\n" not in text
    return text


def test_this_one_will_do() -> None:
    check_interpreter(sys.executable, FLAG)


def test_a_wrapper_will_do_and_may_print(tmp_path: Path) -> None:
    text = f'#!/bin/sh\necho a banner\necho a warning >&2\nexec "{sys.executable}" "$@"\n'
    check_interpreter(script(tmp_path / "python", text), FLAG)


def test_a_missing_one_is_refused(tmp_path: Path) -> None:
    assert "is missing or not executable" in refusal(str(tmp_path / "python"))
    (tmp_path / "text").write_text("no program")
    assert "is missing or not executable" in refusal(str(tmp_path / "text"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\n", "headrace installed; give"),
        ("#!/bin/sh\necho hello\n", "headrace installed; give"),
        ("#!/bin/sh\necho headrace\n", "headrace installed; give"),
        ("#!/bin/sh\necho one; echo two >&2; exit 3\n", "headrace installed (two); give"),
        (f"#!/bin/sh\necho headrace {VERSION}; exit 3\n", "headrace installed; give"),
        ("#!/nowhere/sh\n", "headrace installed (No such file or directory); give"),
        ("no program\n", "headrace installed (Exec format error); give"),
    ],
)
def test_what_is_no_python_with_headrace_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(script(tmp_path / "python", text))


def test_one_that_is_silent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "PROBE_TIMEOUT_S", 0.2)
    python = script(tmp_path / "python", "#!/bin/sh\nexec sleep 600\n")
    assert "it was silent for 0 s" in refusal(python)


def test_another_version_is_refused(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "#!/bin/sh\necho headrace 0.0.1\n")
    assert f"the headrace of {python} is 0.0.1, and this one is {VERSION}" in refusal(python)


def test_what_is_short_just_now_is_no_fault_of_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(Refused, match="just now: Resource temporarily unavailable") as told:
        check_interpreter(sys.executable, FLAG)
    assert told.value.shortage
