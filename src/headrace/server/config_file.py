"""Reading headrace.toml: what is wrong with it is refused in one sentence that names the place."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import Refused
from headrace.runtime.roster import OWN_ENGINE
from headrace.server.config import DecoderTable, ServeConfig
from headrace.server.config_keys import Table, file_table, key_at, value_at
from headrace.server.label_words import OTHER

MAX_FILE_NBYTES: Final = 1 << 20
SECRETS: Final = ("api_key_file", "otlp_endpoint")
"""Keys whose values no message repeats: a key itself may have been put there by mistake."""

_SHOWN_CHARACTERS = 60
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # of Unicode: control, format, line ends
_PLACE = re.compile(r"(.*) - at `\$\.(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


def read_config(path: Path) -> ServeConfig:
    """The config that a file holds; whether it can be served here is for `check_config` to say.

    Raises:
        Refused: it cannot be read, is no TOML, or has a key or a value that makes no sense.
    """
    return parse_config(_text_of(path), str(path))


def parse_config(text: str, where: str) -> ServeConfig:
    """The config that a text says. where: what a refusal calls the text."""
    try:
        raw = tomllib.loads(text)
    except ValueError as exc:  # also a number of thousands of digits
        raise Refused(f"{where} is no TOML: {exc}") from exc
    except RecursionError as exc:
        raise Refused(f"{where} is no TOML of ours: it is nested too deeply") from exc
    try:
        return config_of(raw)
    except Refused as exc:
        raise Refused(f"{where}: {exc}", field=exc.field) from exc


def config_of(raw: Mapping[str, Any]) -> ServeConfig:
    """The config of tables as TOML has them. Raises: Refused: a key or a value makes no sense."""
    _check_keys(raw, file_table(), "")
    try:
        config = msgspec.convert(raw, ServeConfig)
    except msgspec.ValidationError as exc:
        raise Refused(_told(str(exc), raw)) from exc
    for index, decoder in enumerate(config.decoders):
        place = f"decoders[{index}]"
        _check_names(decoder, place)
        _check_option(decoder.options, f"{place}.options")
        for number, source in enumerate(decoder.sources):
            _check_option(source.options, f"{place}.sources[{number}].options")
    return config


def decoder_names(decoders: Sequence[DecoderTable]) -> tuple[str, ...]:
    """What metrics, logs and the page call each decoder.

    Raises:
        Refused: two have the same.
    """
    several, seen = Counter(each.decoder for each in decoders), Counter[str]()
    names = []
    for each in decoders:
        seen[each.decoder] += 1
        number = f"-{seen[each.decoder]}" if several[each.decoder] > 1 else ""
        names.append(each.name or f"{each.decoder}{number}")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        first, second = [index for index, each in enumerate(names) if each == name][:2]
        raise Refused(
            f"decoders[{first}] and decoders[{second}] are both named {name}; give one another "
            "name",
            field="name",
        )
    return tuple(names)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = file.read(MAX_FILE_NBYTES + 1)
    except FileNotFoundError as exc:
        raise Refused(
            f"{path} is missing; `headrace config show` prints one to begin with"
        ) from exc
    except IsADirectoryError as exc:
        raise Refused(f"{path} is a directory; name the file in it") from exc
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise Refused(f"{path} cannot be read: {why}") from exc
    if len(found) > MAX_FILE_NBYTES:
        raise Refused(f"{path} has more than {MAX_FILE_NBYTES} bytes; name a config")
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise Refused(f"{path} is not UTF-8 text (byte {exc.start}); save it as UTF-8") from exc


def _check_keys(raw: Mapping[str, Any], table: Table, place: str) -> None:
    """Refuse the first key that its table does not have, with what was probably meant."""
    for name, value in raw.items():
        key = table.key(name)
        if key is None:
            where = f"in {place}" if place else "at the top level"
            raise Refused(f"unknown key `{name}` {where}{_meant(name, table)}", field=name)
        if key.tables is None:
            continue
        here = f"{place}.{name}".removeprefix(".")
        if not key.repeated and isinstance(value, dict):
            _check_keys(value, key.tables, here)
        elif key.repeated and isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, dict):
                    _check_keys(each, key.tables, f"{here}[{index}]")


def _check_names(decoder: DecoderTable, place: str) -> None:
    """Refuse names that metrics have another meaning for, and those that are not shown whole."""
    if decoder.name == OTHER:
        raise Refused(f"{place}.name is {OTHER}, which metrics call all else; give another name")
    for number, source in enumerate(decoder.sources):
        if source.name in (OTHER, OWN_ENGINE):
            raise Refused(
                f"{place}.sources[{number}].name is {source.name}, which metrics and logs call "
                "something else; give another name"
            )
    for number, name in enumerate(decoder.served_as):
        if any(unicodedata.category(each) in _UNSEEN for each in name):
            raise Refused(
                f"{place}.served_as[{number}] is {name!a}; it has a character that is not seen"
                ", such as a line's end; leave that out"
            )


def _check_option(value: Any, place: str) -> None:
    """Refuse what no engine can be handed: dates, and numbers that are none."""
    match value:
        case dict():
            for key, each in value.items():
                _check_option(each, f"{place}.{key}")
        case list():
            for index, each in enumerate(value):
                _check_option(each, f"{place}[{index}]")
        case float() if not math.isfinite(value):
            raise Refused(f"{place} is {value}; give a number")
        case int() if not -(1 << 63) <= value < 1 << 63:
            raise Refused(f"{place} has more than 64 bits; give a smaller number")
        case datetime.date() | datetime.time():
            raise Refused(f"{place} is a date or a time, which no option is; put it in quotes")


def _meant(name: str, table: Table) -> str:
    near = difflib.get_close_matches(name, [each.name for each in table.keys], n=1)
    if near:
        return f"; did you mean `{near[0]}`?"
    others = [each.header for each in file_table().below() if each.key(name) is not None]
    if others:
        return f"; it is a key of {' and '.join(f'[{each}]' for each in others)}"
    return f"; its keys are {', '.join(each.name for each in table.keys)}"


def _told(error: str, raw: Any) -> str:
    """What a validation error says, by the key's own rule."""
    found = _PLACE.fullmatch(error)
    text, place = (found[1], found[2]) if found else (error, "")
    if missing := _MISSING.fullmatch(text):
        if missing[1] == "decoders":
            return "there is no [[decoders]]; add one with its model"
        return f"{place} has no {missing[1]}; `headrace models list` shows what is built in"
    key = key_at(place)
    if key is None:
        return error
    if key.name in SECRETS:
        return f"{place} has no value of its kind; it is {key.rule}"
    rule = key.rule
    if place.endswith("]"):  # an item of its list
        plain = rule.removeprefix("a list, each item ")
        rule = plain if key.tables is None else f"a table, under [[{key.tables.header}]]"
    return f"{place} is {_shown(value_at(raw, place))}; it is {rule}"


def _shown(value: object) -> str:
    """A value as a sentence may hold it: short, and on one line."""
    match value:
        case dict():
            return "a table"
        case list():
            return "a list" if value else "an empty list"
        case bool():
            return "true" if value else "false"
        case str():
            text = json.dumps(value, ensure_ascii=False)
        case _:
            text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
