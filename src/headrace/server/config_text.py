"""Writing headrace.toml: every key with its value and what it is, fit to be read again."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from headrace.errors import Refused
from headrace.server.config import DecoderTable, ServeConfig
from headrace.server.config_keys import Key, Table, file_table

EXAMPLE_MODEL: Final = "smollm2-135m"

_WIDTH = 98
_PLAIN = ("a table", "a text", "a text that is not empty", "true or false")  # the value shows it
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED = {chr(code): f"\\u{code:04x}" for code in (0x7F, *range(0x80, 0xA0))}


def default_text() -> str:
    """A config of one decoder to begin with, all else as it is by default."""
    return config_text(ServeConfig(decoders=(DecoderTable(model=EXAMPLE_MODEL),)))


def config_text(config: ServeConfig) -> str:
    """A config as TOML with every key. A key that is off, which TOML has no word for, is a comment.

    Raises:
        Refused: an option of a decoder or a source is nothing that TOML can say.
    """
    values = msgspec.structs.asdict(config)
    tables = sorted(file_table().keys, key=lambda key: key.name == "decoders")
    return "\n".join(line for key in tables for line in _tables(key, values[key.name])).lstrip()


def _tables(key: Key, value: Any) -> Iterator[str]:
    if key.tables is not None:
        for each in value if key.repeated else (value,):
            yield from _table(key.tables, each, repeated=key.repeated)


def _table(table: Table, struct: msgspec.Struct, *, repeated: bool) -> Iterator[str]:
    values = msgspec.structs.asdict(struct)
    yield ""
    if table.about:
        yield from _comment(f"{table.about[:1].upper()}{table.about[1:]}")
    yield f"[[{table.header}]]" if repeated else f"[{table.header}]"
    for key in table.keys:
        if key.tables is not None:
            continue
        yield from _comment(key.about if key.rule in _PLAIN else f"{key.about} ({key.rule})")
        value = values[key.name]
        yield f"# {key.name} =" if value is None else f"{key.name} = {toml_value(value, key.name)}"
    for key in table.keys:  # what follows a header of its own belongs to that
        yield from _tables(key, values[key.name])


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def toml_value(value: Any, name: str = "value") -> str:
    """A value as TOML writes it. Raises: Refused: it has no way to."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _text(value)
        case list() | tuple():
            return f"[{', '.join(toml_value(each, name) for each in value)}]"
        case Mapping():
            pairs = (f"{_key(key)} = {toml_value(each, key)}" for key, each in value.items())
            inside = ", ".join(pairs)
            return f"{{ {inside} }}" if inside else "{}"
        case _:
            raise Refused(f"{name} is {value!r}, which no TOML file can say; leave it out")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    written = json.dumps(text, ensure_ascii=False)
    return "".join(_ESCAPED.get(character, character) for character in written)
