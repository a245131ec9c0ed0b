"""What the page says of decoders and sources that are not what their names say."""

from __future__ import annotations

from typing import Any

from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.server.page_notes import EMULATED, FAKE, MEMORY, PACED, notes_of


def owner(*sources: SourceConfig, decoder: str = "cpu", **options: Any) -> OwnerConfig:
    return OwnerConfig(decoder, options, sources or (SourceConfig("torch", {}),), 128)


def test_what_is_real_has_no_note() -> None:
    rngd = SourceConfig("rngd", {"emulate": False})
    assert notes_of({"cpu": owner(), "two": owner(rngd, decoder="atom")}) == {}


def test_each_of_the_other_words_is_said() -> None:
    sources = (
        SourceConfig("rngd", {"emulate": True}),
        SourceConfig("rngd", {"emulate": True}, name="second"),
        SourceConfig("replay", {}),
    )
    named = {"left": owner(*sources), "right": owner(decoder="atom", sdk="fakes")}
    assert notes_of(named | {"none": owner(decoder="null")}) == {
        ("left", "rngd-1"): EMULATED,
        ("left", "second"): EMULATED,
        ("left", "replay"): PACED,
        ("right", ""): FAKE,
        ("none", ""): MEMORY,
    }
