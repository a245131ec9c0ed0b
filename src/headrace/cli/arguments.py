"""Checks of arguments that several commands share; each refuses with one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.text import ModelText, max_positions_of, stop_tokens_of
from headrace.errors import Refused
from headrace.geometry import MAX_POSITIONS

MAX_SECONDS = 1e9  # 30 years
INSTALL = "run: pip install 'headrace[cpu]'"


def check_count(flag: str, value: int, *, least: int = 1, limit: int = MAX_POSITIONS) -> None:
    """Refuse a value outside [least, limit)."""
    if value < least:
        rule = "cannot be negative" if least == 0 else f"must be at least {least}"
        raise Refused(f"{flag} is {value}; it {rule}", field=flag)
    if value >= limit:
        raise Refused(f"{flag} is {value}; it must be at most {limit - 1}", field=flag)


def check_seconds(flag: str, value: float) -> None:
    """Refuse a time that is not above zero, or beyond every clock."""
    if not 0 < value <= MAX_SECONDS:  # also what is no number
        raise Refused(
            f"{flag} is {value:g}; it must be above 0 and at most {MAX_SECONDS:g} seconds",
            field=flag,
        )


def check_given(flag: str, given: str | None) -> None:
    """Refuse a text that is there and empty."""
    if given is not None and not given.strip():
        raise Refused(f"{flag} is empty; name one, or leave it out", field=flag.removeprefix("--"))


def check_output(flag: str, path: Path | None, *, make_parents: bool = False) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    if path is None:
        return
    if path.is_dir():
        raise Refused(f"{flag}: {path} is a directory; name a file", field=flag)
    parent = path.absolute().parent
    while make_parents and not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise Refused(f"{flag}: {parent} is not a directory; name a file in one", field=flag)
    existing = path if path.exists() else parent
    if not os.access(existing, os.W_OK):
        raise Refused(f"{flag}: {existing} cannot be written; name another file", field=flag)


def check_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that were not UTF-8: neither a tokenizer nor a message can carry them."""
    for argument in arguments:
        if not is_text(argument):
            raise Refused(f"the argument {argument!r} is not UTF-8 text; give it as UTF-8")


def is_text(text: str) -> bool:
    """Whether `text` holds no lone surrogates, as undecodable bytes become in Python."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The JSON object that a flag was given."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as exc:
        raise Refused(f"{flag} is not a JSON object: {exc}", field=flag) from exc


def read_prompt(path: Path) -> str:
    """The text of a prompt file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise Refused(f"{path} is not UTF-8 text; give the prompt as UTF-8") from exc
    except OSError as exc:
        raise Refused(f"the prompt file {path} cannot be read: {exc.strerror}") from exc


def open_text(directory: Path) -> tuple[ModelText, int]:
    """The tokenizer of a model directory, and the most positions that the model holds.

    Raises:
        Refused: naming the file that is broken, or the package that is missing.
    """
    for name in ("config.json", "generation_config.json"):
        _check_json(directory / name)
    try:
        longest = max_positions_of(directory)
    except (OSError, AttributeError, TypeError, ValueError) as exc:
        raise _broken(directory / "config.json", exc) from exc
    try:
        stop_tokens_of(directory)
    except (OSError, AttributeError, TypeError, ValueError) as exc:
        path = directory / "generation_config.json"
        raise _broken(path if path.is_file() else directory / "config.json", exc) from exc
    try:
        return ModelText(directory), longest
    except Refused:
        raise
    except ModuleNotFoundError as exc:
        raise Refused(f"reading text needs {exc.name}, which is not installed; {INSTALL}") from exc
    except Exception as exc:  # tokenizers raises nothing narrower
        raise _broken(directory / "tokenizer.json", exc) from exc


def _check_json(path: Path) -> None:
    if not path.is_file():
        return
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise _broken(path, exc) from exc
    if not isinstance(value, dict):
        raise _broken(path, TypeError("it holds no JSON object"))


def _broken(path: Path, exc: Exception) -> Refused:
    return Refused(f"{path} cannot be used ({exc}); save the model there again", field="model")
