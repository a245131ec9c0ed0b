"""What an owner is started with: each source has a name of its own, and each option its place."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import Refused
from headrace.runtime.config import MAX_SOURCES, OwnerConfig, SourceConfig, names_of


def sources(*named: tuple[str, str]) -> tuple[SourceConfig, ...]:
    return tuple(SourceConfig(source, {}, name=name) for source, name in named)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([("torch", "")], ("torch",)),
        ([("torch", ""), ("rngd", "")], ("torch", "rngd")),
        ([("torch", ""), ("rngd", ""), ("torch", "")], ("torch-1", "rngd", "torch-2")),
        ([("torch", "left"), ("torch", "")], ("left", "torch-2")),
        ([("module:open", ""), ("module:open", "b.2")], ("module:open-1", "b.2")),
    ],
)
def test_a_source_without_a_name_is_called_what_it_is(
    given: list[tuple[str, str]], names: tuple[str, ...]
) -> None:
    assert names_of(sources(*given)) == names


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        ([], "sources", "an owner with 0 sources"),
        ([("torch", "")] * (MAX_SOURCES + 1), "sources", "give it from 1 to 16"),
        ([("torch", "a"), ("rngd", "a")], "name", "two sources are named a"),
        ([("torch", "rngd"), ("rngd", "")], "name", "two sources are named rngd"),
        ([("torch", "torch-2"), ("torch", "")], "name", "two sources are named torch-2"),
        ([("torch", "a b")], "name", "'a b' is none"),
        ([("torch", "x" * 65)], "name", "up to 64 letters"),
        ([("torch", "a\n")], "name", "is none"),
    ],
)
def test_what_names_nobody_or_two_is_refused(
    given: list[tuple[str, str]], field: str, text: str
) -> None:
    with pytest.raises(Refused) as caught:
        names_of(sources(*given))
    assert caught.value.field == field
    assert text in str(caught.value)


def test_an_interpreter_is_for_those_that_name_none() -> None:
    own = SourceConfig("rngd", {"cards": 2}, python="/vendor/python", num_slots=3)
    config = OwnerConfig("null", {"lanes": 1}, (SourceConfig("replay", {}), own), 64)
    changed = config.with_source_python("/a/python")
    assert [each.python for each in changed.sources] == ["/a/python", "/vendor/python"]
    assert changed.sources[1] == own
    assert changed.decoder_options == {"lanes": 1}
    assert config.sources[0].python is None


def test_a_config_travels_as_json() -> None:
    config = OwnerConfig("null", {}, sources(("torch", "a"), ("replay", "")), 64)
    text = msgspec.json.encode(config)
    assert msgspec.json.decode(text, type=OwnerConfig) == config
    with pytest.raises(msgspec.ValidationError, match="num_slots"):
        msgspec.json.decode(text[:-1] + b', "num_slots": 2}', type=OwnerConfig)
