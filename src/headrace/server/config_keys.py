"""The keys of headrace.toml, read off its tables: what each is, and what it may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from msgspec import NODEFAULT, inspect

from headrace.server.config import ADDRESS, NAME, ServeConfig

_PATTERNS: Final = {
    NAME: "a name of up to 64 letters, digits and . _ -, the first a letter or digit",
    ADDRESS: "an http or https address; what the collector asks for belongs into "
    "OTEL_EXPORTER_OTLP_HEADERS",
}
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


class Key(NamedTuple):
    """One key of a table. default: NODEFAULT where it must be given. tables: its own, if it holds
    tables.
    """

    name: str
    about: str
    rule: str
    default: Any
    tables: Table | None
    repeated: bool


class Table(NamedTuple):
    """One table. header: `http`, or `decoders.sources` where it stands there any number of times.

    about: what it is, after its name. keys: in the order of the file.
    """

    header: str
    about: str
    keys: tuple[Key, ...]

    def key(self, name: str) -> Key | None:
        """The key of that name."""
        return next((each for each in self.keys if each.name == name), None)

    def below(self) -> Iterator[Table]:
        """Its own tables and theirs."""
        for key in self.keys:
            if key.tables is not None:
                yield key.tables
                yield from key.tables.below()


@lru_cache(maxsize=1)
def file_table() -> Table:
    """The file itself, which holds all other tables."""
    return _table("", cast(inspect.StructType, inspect.type_info(ServeConfig)))


def key_at(path: str) -> Key | None:
    """The key at a place such as `decoders[0].sources[1].slots`; of an item its list's key."""
    table: Table | None = file_table()
    key: Key | None = None
    for name, _ in _STEP.findall(f".{path}"):
        if name:
            key = None if table is None else table.key(name)
            table = None if key is None else key.tables
    return key


def value_at(raw: Any, path: str) -> Any:
    """What a file says at a place."""
    for name, index in _STEP.findall(f".{path}"):
        raw = raw[name] if name else raw[int(index)]
    return raw


def _table(header: str, info: inspect.StructType) -> Table:
    about = (info.cls.__doc__ or "").partition(": ")[2].strip().partition("\n")[0]
    return Table(header, about, tuple(_key(header, field) for field in info.fields))


def _key(header: str, field: inspect.Field) -> Key:
    kind, about = field.type, ""
    if isinstance(kind, inspect.Metadata):
        about = str((kind.extra_json_schema or {}).get("description", ""))
        kind = kind.type
    inner = kind.item_type if isinstance(kind, inspect.VarTupleType) else kind
    tables = None
    if isinstance(inner, inspect.StructType):
        tables = _table(f"{header}.{field.name}".removeprefix("."), inner)
    default = field.default
    if field.default_factory is not NODEFAULT:
        default = field.default_factory()
    repeated = tables is not None and inner is not kind
    return Key(field.name, about, _rule(kind, tables), default, tables, repeated)


def _rule(kind: inspect.Type, tables: Table | None) -> str:
    """What a value of a type may be, in words."""
    match kind:
        case inspect.UnionType(types):
            given = [each for each in types if not isinstance(each, inspect.NoneType)]
            return " or ".join(_rule(each, tables) for each in given)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a count{_range(kind)}"
        case inspect.FloatType():
            return f"a number{_range(kind)}"
        case inspect.LiteralType(values):
            return f"one of {', '.join(sorted(map(str, values)))}"
        case inspect.StrType():
            return _text_rule(kind)
        case inspect.VarTupleType(item_type=item) if tables is not None:
            return f"one table or more, at most {kind.max_length}, each under [[{tables.header}]]"
        case inspect.VarTupleType(item_type=item):
            return f"a list, each item {_rule(item, None)}"
        case _:
            return "a table"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.gt is not None:
        return f" above {kind.gt:g} and at most {kind.le:g}"
    upto = (
        "" if kind.le is None else f" to {kind.le if isinstance(kind.le, int) else f'{kind.le:g}'}"
    )
    return f" from {kind.ge:g}{upto}"


def _text_rule(kind: inspect.StrType) -> str:
    if kind.pattern is not None:
        return _PATTERNS[kind.pattern]
    if kind.max_length is not None:
        return f"a text of {kind.min_length} to {kind.max_length} characters"
    return "a text that is not empty" if kind.min_length else "a text"
