"""Text to token ids and back, by a model directory's own tokenizer. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import Refused


class TextCodec(Protocol):
    """What turns a prompt into ids and ids into text."""

    stop_tokens: tuple[int, ...]

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of a text; add_special: with those that a model wants around a prompt."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of ids, without special tokens; what is no UTF-8 becomes U+FFFD."""
        ...

    def text_of(self, token: int) -> str:
        """What one id reads as by itself; of a special token its name."""
        ...

    def skips(self, token: int) -> bool:
        """Whether `decode` leaves this id out."""
        ...

    def byte_of(self, token: int) -> int | None:
        """The byte that this id stands for, if bytes beside each other make text only together.

        One that is no UTF-8 then spoils all bytes beside it.
        """
        ...


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
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(int(token) for token, told in added.items() if told.special)
        self._bytes = self._fallback_bytes()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        # One text as a batch: the tokenizer then lets other threads run meanwhile.
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0]
        return [int(token) for token in encoded.ids]

    @property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def skips(self, token: int) -> bool:
        return token in self._special or self._tokenizer.id_to_token(token) is None

    def byte_of(self, token: int) -> int | None:
        return self._bytes.get(token)

    def _fallback_bytes(self) -> dict[int, int]:
        found = {}
        for byte in range(256):
            token = self._tokenizer.token_to_id(f"<0x{byte:02X}>")
            if token is not None:
                found[int(token)] = byte
        # Only a decoder that falls back to bytes reads these words as bytes.
        letter = next((token for token, byte in found.items() if byte == ord("A")), None)
        return found if letter is not None and self.decode([letter]) == "A" else {}


class ByteText:
    """UTF-8 bytes as ids, for sources without a model."""

    stop_tokens: tuple[int, ...] = ()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token & 0xFF for token in tokens).decode(errors="replace")

    def text_of(self, token: int) -> str:
        return self.decode([token])

    def skips(self, token: int) -> bool:
        return False

    def byte_of(self, token: int) -> int | None:
        return None


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
