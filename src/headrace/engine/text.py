"""Text to token ids and back, by a model directory's own tokenizer. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import Refused


class TextCodec(Protocol):
    """What turns a prompt into ids and ids into text."""

    stop_tokens: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ModelText:
    """The tokenizer of a model directory (tokenizer.json)."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise Refused(
                f"{directory} has no tokenizer.json; save the model's fast tokenizer there"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        self.stop_tokens = stop_tokens_of(directory)

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text).ids]

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class ByteText:
    """UTF-8 bytes as ids, for sources without a model."""

    stop_tokens: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token & 0xFF for token in tokens).decode(errors="replace")


def stop_tokens_of(directory: Path) -> tuple[int, ...]:
    """The ids that end a text, by generation_config.json, else by config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            found = _as_ids(json.loads(path.read_text()).get("eos_token_id"))
            if found:
                return found
    return ()


def max_positions_of(directory: Path) -> int:
    """The longest context that the model was made for, in positions."""
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    return int(text.get("max_position_embeddings", 1 << 20))


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
