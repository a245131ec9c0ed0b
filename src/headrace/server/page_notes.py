"""What is to be known of decoders and sources that are not what their names say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.runtime.config import OwnerConfig, names_of
from headrace.runtime.pairs import is_emulated, is_fake
from headrace.server.page_decoders import Notes

PACED: Final = "paced, no model"
EMULATED: Final = "emulated"
FAKE: Final = "fake"
MEMORY: Final = "memory only, no model"


def notes_of(owners: Mapping[str, OwnerConfig]) -> Notes:
    """Which of the decoders and sources are paced, emulated or fake; `owners`: by decoder.

    Raises:
        Refused: two sources of one decoder have the same name.
    """
    found: dict[tuple[str, str], str] = {}
    for decoder, owner in owners.items():
        if is_fake(owner.decoder, owner.decoder_options):
            found[decoder, ""] = FAKE
        elif owner.decoder == "null":
            found[decoder, ""] = MEMORY
        for name, source in zip(names_of(owner.sources), owner.sources, strict=True):
            if is_emulated(source.source, source.options):
                found[decoder, name] = EMULATED
            elif source.source == "replay":
                found[decoder, name] = PACED
    return found
