"""The keys that are asked for are those that were checked, or the server does not start."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace.errors import Refused
from headrace.server.config import HttpConfig
from headrace.server.keys import KEY_VARIABLE, MAX_KEYS_NBYTES, keys_of, read_keys, take_keys
from tests.conftest import open_fds


@pytest.fixture(autouse=True)
def _no_key_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")  # so that what a test takes out is put back
    monkeypatch.delenv(KEY_VARIABLE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    made.write_text("sk-secret\n")
    made.chmod(0o600)
    return made


def test_a_line_is_a_key_and_the_environment_has_one_more(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_keys(HttpConfig()) == ()
    path.write_text("\n sk-1 \r\nsk-2\n\nsk-1\n")
    http = HttpConfig(api_key_file=str(path))
    assert read_keys(http) == ("sk-1", "sk-2")
    monkeypatch.setenv(KEY_VARIABLE, " sk-3\n")
    assert read_keys(http) == ("sk-1", "sk-2", "sk-3")
    assert read_keys(HttpConfig()) == ("sk-3",)


def test_what_is_started_here_does_not_inherit_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sk-3")
    assert take_keys(HttpConfig()) == ("sk-3",)
    assert KEY_VARIABLE not in os.environ
    assert take_keys(HttpConfig()) == ()


@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_an_empty_key_in_the_environment_is_refused(
    value: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, value)
    for http in (HttpConfig(), HttpConfig(api_key_file=str(path))):
        with pytest.raises(Refused, match=f"^{KEY_VARIABLE} is set and empty"):
            read_keys(http)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o644, 0o666])
def test_a_key_file_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(Refused, match=rf"^K names .* \(mode {mode:04o}\); run: chmod 600") as said:
        keys_of(path, "K")
    assert "secret" not in str(said.value)
    for allowed in (0o600, 0o400, 0o640, 0o440):
        path.chmod(allowed)
        assert keys_of(path, "K") == ["sk-secret"]


def test_a_key_file_that_is_none_is_refused_without_repeating_it(path: Path) -> None:
    for text in (b"", b" \n\n", b"\xff\xfe", b"k" * (MAX_KEYS_NBYTES + 1)):
        path.write_bytes(text)
        with pytest.raises(Refused, match=r"^K names a file that holds no keys"):
            keys_of(path, "K")
    for none in (Path("sk-secret"), Path("sk-secret\0")):
        with pytest.raises(Refused, match=r"^K names a file that cannot be read") as said:
            keys_of(none, "K")
        assert "secret" not in str(said.value)


@pytest.mark.parametrize("line", ["# sk-mine", "#sk-mine", "  # sk-mine", "sk-mine of Ann", "a\tb"])
def test_a_line_that_looks_like_a_comment_is_no_key(path: Path, line: str) -> None:
    """Else whoever sends the comment is let in."""
    path.write_text(f"sk-1\n\n{line}\nsk#2\n")
    with pytest.raises(Refused, match=r"^line 3 of the file that K names begins with #") as said:
        keys_of(path, "K")
    assert line.strip() not in str(said.value)
    path.write_text("sk-1\nsk#2\n")
    assert keys_of(path, "K") == ["sk-1", "sk#2"]


def test_what_is_read_but_once_is_no_key_file(tmp_path: Path) -> None:
    """A pipe, waited for by nobody and filled before; a socket; a device; a directory."""
    empty, full = tmp_path / "empty", tmp_path / "full"
    for each in (empty, full):
        os.mkfifo(each, 0o600)
    writer = os.open(full, os.O_RDWR)
    os.write(writer, b"sk-secret\n")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(tmp_path / "socket"))
    before = open_fds()
    try:
        for path in (empty, full, tmp_path / "socket", Path("/dev/null"), tmp_path):
            with pytest.raises(Refused, match=r"^K names (no regular file|a file that cannot)"):
                keys_of(path, "K")
        assert open_fds() == before
    finally:
        bound.close()
        os.close(writer)


def test_a_file_that_lost_its_keys_leaves_no_server_open(path: Path) -> None:
    http = HttpConfig(api_key_file=str(path))
    assert take_keys(http)
    path.write_text("")
    with pytest.raises(Refused, match="holds no keys"):
        take_keys(http)
