"""What `headrace config show` writes can be read again, and says every key."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import Refused
from headrace.server.config import (
    DecoderTable,
    HttpConfig,
    QueueConfig,
    ServeConfig,
    SourceTable,
)
from headrace.server.config_file import parse_config
from headrace.server.config_keys import file_table
from headrace.server.config_text import EXAMPLE_MODEL, config_text, default_text, toml_value

FULL = ServeConfig(
    decoders=(
        DecoderTable(
            model="a/b",
            name="x",
            served_as=('q"uote', "ü"),
            lanes=3,
            options={"deep": {"a b": [1, 2.5, True]}, "text": "line\nline\\ü\u2028\x7f"},
            sources=(SourceTable(), SourceTable(source="m:f", python="/a b/python", slots=1)),
        ),
        DecoderTable(model="c", sources=(SourceTable(emulate=True, name="e"),)),
    ),
    http=HttpConfig(host="::1", drain_timeout_s=1e-05, api_key_file="/k"),
    queue=QueueConfig(deadline_s=2.0),
)


@pytest.mark.parametrize("config", [FULL, ServeConfig(decoders=(DecoderTable(model="m"),))])
def test_a_config_that_is_shown_is_the_same_when_it_is_read(config: ServeConfig) -> None:
    text = config_text(config)
    assert parse_config(text, "f") == config
    assert config_text(parse_config(text, "f")) == text


def test_the_default_has_every_key_of_every_table() -> None:
    text = default_text()
    assert parse_config(text, "f").decoders[0].model == EXAMPLE_MODEL
    lines = text.splitlines()
    for table in file_table().below():
        assert {f"[{table.header}]", f"[[{table.header}]]"} & set(lines), table.header
        assert table.about, table.header
        for key in table.keys:
            assert key.tables or key.about.endswith("."), key
            starts = (f"{key.name} = ", f"# {key.name} =")
            assert key.tables or any(line.startswith(starts) for line in lines), key.name
    assert max(map(len, lines)) <= 100


values = st.recursive(
    st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text(st.characters(blacklist_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(blacklist_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(values)
def test_any_value_is_read_as_it_was_written(value: Any) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


def test_what_toml_cannot_say_is_refused_by_its_key() -> None:
    with pytest.raises(Refused, match=r"^b is None, which no TOML file can say"):
        toml_value({"a": [{"b": None}]})
