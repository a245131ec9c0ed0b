"""Every check of an argument, and what it says."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from headrace.cli import _fill_standard_descriptors, _spelled, run_command
from headrace.cli.arguments import check_count, check_output, open_text, read_prompt
from headrace.errors import Refused

REPLAY = ["run", "--source", "replay", "--decoder", "null", "--max-tokens", "1"]
CONFIG = '{"model_type": "llama", "max_position_embeddings": 64, "eos_token_id": [1, 2]}'
TOKENIZER = (
    '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
)


@pytest.mark.parametrize(
    ("value", "least", "sentence"),
    [(0, 1, "at least 1"), (-1, 0, "cannot be negative"), (1 << 63, 0, "at most 4294967295")],
)
def test_counts_have_limits(value: int, least: int, sentence: str) -> None:
    check_count("--n", least, least=least)
    with pytest.raises(Refused, match=sentence):
        check_count("--n", value, least=least)


def test_an_output_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    check_output("--out", None)
    check_output("--out", tmp_path / "new")
    check_output("--out", tmp_path / "file")
    check_output("--out", tmp_path / "a" / "b" / "new", make_parents=True)
    with pytest.raises(Refused, match="is a directory"):
        check_output("--out", tmp_path)
    with pytest.raises(Refused, match="is not a directory"):
        check_output("--out", tmp_path / "a" / "new")
    with pytest.raises(Refused, match="is not a directory"):
        check_output("--out", tmp_path / "file" / "new", make_parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(Refused, match="cannot be written"):
        check_output("--out", tmp_path / "new")


def test_a_prompt_file_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("é".encode())
    assert read_prompt(path) == "é"
    path.write_bytes(b"\xff")
    with pytest.raises(Refused, match="is not UTF-8 text"):
        read_prompt(path)
    with pytest.raises(Refused, match="cannot be read: Is a directory"):
        read_prompt(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    return tmp_path


def test_a_model_directory_in_order(model: Path) -> None:
    codec, longest = open_text(model)
    assert (codec.stop_tokens, longest) == ((1, 2), 64)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"text_config": null}'),
        ("config.json", '{"max_position_embeddings": "many"}'),
        ("config.json", '{"eos_token_id": "end"}'),
        ("config.json", None),
        ("generation_config.json", "\xff"),
        ("generation_config.json", '{"eos_token_id": {}}'),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
    ],
)
def test_a_broken_file_of_a_model_is_named(model: Path, name: str, content: str | None) -> None:
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_text(content, encoding="latin-1")
    with pytest.raises(Refused, match=rf"\b{name}\b") as refused:
        open_text(model)
    assert "\n" not in str(refused.value)


def test_no_tokenizers_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Refused, match=r"tokenizers.*pip install 'headrace\[cpu\]'"):
        open_text(model)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        (["run", "-"], ["run", "--stdin"]),
        (["run", "--json", "-"], ["run", "--json", "--stdin"]),
        (["run", "--prompt", "-"], ["run", "--prompt=-"]),
        (["run", "--stop", "-", "-"], ["run", "--stop=-", "--stdin"]),
        (
            ["run", "--seed", "-1", "--no-json", "-"],
            ["run", "--seed", "-1", "--no-json", "--stdin"],
        ),
        (["run", "--stop=-", "--prompt"], ["run", "--stop=-", "--prompt"]),
    ],
)
def test_a_lone_dash_is_stdin_unless_it_is_a_value(given: list[str], spelled: list[str]) -> None:
    assert list(_spelled(given)) == spelled


def test_closed_standard_descriptors_are_filled() -> None:
    kept = os.dup(0)
    try:
        os.close(0)
        _fill_standard_descriptors()
        assert os.readlink("/proc/self/fd/0") == os.devnull
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "a", "--seed", "-1"], "--seed is -1"),
        (["--prompt", "a", "--seed", str(1 << 63)], f"at most {(1 << 63) - 1}"),
        (["--prompt", "a", "--top-k", str(1 << 63)], "--top-k is 9223372036854775808"),
        (["--prompt", "a", "--chunk", str(1 << 63)], "--chunk is 9223372036854775808"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature is nan"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature is -1"),
        (["--prompt", "a", "--top-p", "0"], "--top-p is 0"),
        (["--prompt", "a", "--context", "0"], "--context is 0"),
        (["--prompt", "a", "--stop", ""], "--stop is empty"),
        (["--prompt", "a", "--trace", "/tmp"], "/tmp is a directory"),
        (["--prompt", "a\udcff"], "not UTF-8 text"),
        (["--prompt", "a", "--stop", "\udcff"], "not UTF-8 text"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    arguments: list[str],
    sentence: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_module("headrace.cli.run"), "OwnerClient", None)
    assert run_command([*REPLAY, *arguments]) == 2
    complaint = capfd.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "standard input is closed"), (b"a\xff", "not UTF-8 text")]
)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text(
    content: bytes | None,
    sentence: str,
    errors: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "stdin"
    path.write_bytes(content or b"")
    with path.open(encoding="utf-8", errors=errors) as stream:
        monkeypatch.setattr(sys, "stdin", None if content is None else stream)
        assert run_command([*REPLAY, "-"]) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), UnicodeEncodeError("ascii", "é", 0, 1, "no")]
)
def test_what_no_check_foresaw_is_a_failure_in_one_sentence(
    error: Exception, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(import_module("headrace.cli.run"), "check_options", fail)
    assert run_command([*REPLAY, "--prompt", "a"]) == 1
    assert capfd.readouterr().err == f"headrace: {error}\n"
